"""What a packed weight stands for, read bit by bit in plain Python: the oracle of the formats, which shares no code with the engine."""

from engine.quantization.base import QuantizedWeight

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def e4m3(code: int) -> float:
    """The value of a float8_e4m3fn: sign, 4 exponent bits with bias 7, 3 mantissa bits (arXiv 2209.05433, table 1)."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def code(q: QuantizedWeight, n: int, k: int) -> int:
    """The code of row n, column k: ``bits`` bits from bit k * bits of the row on, the lowest first."""
    return (int.from_bytes(bytes(q.codes[n].tolist()), "little") >> (k * q.bits)) & ((1 << q.bits) - 1)


def value(q: QuantizedWeight, n: int, k: int) -> float:
    """What row n, column k stands for, in float64."""
    group = k // q.group_size if q.group_size else 0
    if q.group_of_column is not None:
        group = int(q.group_of_column[k])

    def held(t):
        return float(t[n if t.shape[0] > 1 else 0, group])

    c = code(q, n, k)
    if q.levels == "nf4":
        level = NF4[c]
    elif q.levels == "fp8_e4m3":
        level = e4m3(c)
    elif q.zero_points is not None:
        level = c - held(q.zero_points)
    else:
        level = c if q.minima is not None else c - 2 ** (q.bits - 1)
    w = level * held(q.scales) + (held(q.minima) if q.minima is not None else 0.0)
    return w / float(q.input_scales[k]) if q.input_scales is not None else w


def product(x: list[list[float]], q: QuantizedWeight) -> list[list[float]]:
    """x [T, K] times the weight [N, K], transposed, by the definition."""
    rows, columns = q.shape
    return [[sum(row[k] * value(q, n, k) for k in range(columns)) for n in range(rows)] for row in x]
