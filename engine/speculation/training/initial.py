"""Where the training of each drafter begins: at parts of its target, which is worth many steps; and drafters out of files."""

import torch

from engine.model.config import ModelConfig
from engine.speculation.files import DrafterFile
from engine.speculation.training.modules import METHODS, Drafter, DraftModel, Eagle, Exit, Medusa, Target

_SURENESS = 0.5  # of the norm before the head, at the start


def initial_drafter(
    method: str, target: Target, features: torch.Tensor, *, exit_layer: int, num_layers: int = 2, num_heads: int = 4
) -> Drafter:
    """An untrained drafter. ``features`` [N, E]: some of the target's, for their size. ValueError for an unknown method.

    eagle: the target's last layer; fc gives embedding plus feature, both of the embedding's size. draft_model: the target's
    first layers. Both end in the target's norm, but halved: what they say at first is wrong, and so at least less sure.
    medusa: every head repeats the feature (weights zero). layer_skip: the target's norm and an adapter of zero, which is the
    untrained exit exactly.
    """
    config = target.config
    if method == "eagle":
        eagle = Eagle(config)
        _copy(target.layers[-1], eagle.layers[0])
        _copy(target.norm, eagle.norm, _SURENESS)
        eye = torch.eye(config.hidden_size)
        share = target.embed_tokens.weight.std() / features.float().std()
        with torch.no_grad():
            eagle.fc.weight.copy_(torch.cat((eye * share, eye), 1))
        return eagle
    if method == "draft_model":
        model = DraftModel(config, num_layers)
        for layer, source in zip(model.layers, target.layers):
            _copy(source, layer)
        _copy(target.norm, model.norm, _SURENESS)
        return model
    if method == "medusa":
        medusa = Medusa(config, num_heads)
        for parameter in medusa.parameters():
            torch.nn.init.zeros_(parameter)
        return medusa
    if method == "layer_skip":
        leave = Exit(config, exit_layer)
        _copy(target.norm, leave.norm)
        torch.nn.init.zeros_(leave.adapter.weight)
        return leave
    raise ValueError(f"method must be one of {METHODS}, got {method!r}")


def _copy(source: torch.nn.Module, to: torch.nn.Module, times: float = 1.0) -> None:
    to.load_state_dict({name: value * times for name, value in source.state_dict().items()})


def drafter_from_file(file: DrafterFile, config: ModelConfig) -> Drafter:
    """The float32 module with a file's weights: what an engine's drafter made from the same file has to agree with."""
    drafter: Drafter
    if file.method == "eagle":
        drafter = Eagle(config)
    elif file.method == "draft_model":
        drafter = DraftModel(config, file.num_layers or 1)
    elif file.method == "medusa":
        drafter = Medusa(config, file.num_heads or 1)
    else:
        drafter = Exit(config, file.exit_layer or 1)
    drafter.load_state_dict({name: tensor.float() for name, tensor in file.tensors.items()})
    return drafter.requires_grad_(False)
