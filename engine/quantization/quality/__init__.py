"""What quantisation does to a model's predictions, measured offline: perplexity, divergence from the 16-bit model, small probes.

Everything works on a function from token ids to logits (``rows.Logits``) and a tokenizer; no engine is needed, no text is fetched.
"""
