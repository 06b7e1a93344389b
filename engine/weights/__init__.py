"""From a checkpoint's weights to the ones that run: rounded as the configuration says, and what that did to layers and tokens."""
