"""What a forward pass over a packed micro-batch keeps for its backward pass.

V. A. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4, adapted:
RMS norms, which transformers computes in float32 (a float32 copy of the input, the normalised input and the output in
the model's type); grouped-query attention that never holds its scores; a gated feed-forward (gate, its activation, up,
their product); experts; no dropout masks. A test compares with what torch saves for the real modules.

All results are bytes for one token (a patch, for images) in one layer.
"""

from forebay.memory.architecture import Architecture, Vision

FLOAT32 = 4


def _norm(width: int, b: int) -> int:
    """The input as float32, the normalised input, the output."""
    return width * (FLOAT32 + 2 * b)


def layer_bytes(a: Architecture, b: int) -> int:
    """Of a decoder layer without recomputation; `b`: bytes of a number of the model's type."""
    attention = b * (a.query + 2 * a.key_value)  # what attention reads
    attention += 2 * b * a.query  # its output, and the same laid out for the projection
    if a.qk_norm:
        attention += _norm(a.query + a.key_value, b) - b * (a.query + a.key_value)  # their output is counted already
    return 2 * _norm(a.hidden, b) + attention + feed_forward_bytes(a, b)


def feed_forward_bytes(a: Architecture, b: int) -> int:
    """Dense: four vectors. With experts: for each chosen one its input, four vectors and its output; and the router's
    probabilities."""
    if not a.expert_layers:
        return 4 * b * a.intermediate
    chosen = a.experts_per_token * (2 * a.hidden + 4 * a.expert_intermediate)
    return b * chosen + FLOAT32 * a.experts


def working_bytes(a: Architecture, b: int) -> int:
    """Gradients under way in the backward pass of one layer: of the feed-forward's four vectors, the widest ones."""
    width = a.experts_per_token * a.expert_intermediate if a.expert_layers else a.intermediate
    return b * 4 * width


def vision_layer_bytes(v: Vision, b: int) -> int:
    """Of an image layer, for one patch."""
    return 2 * _norm(v.hidden, b) + 5 * b * v.hidden + 4 * b * v.intermediate
