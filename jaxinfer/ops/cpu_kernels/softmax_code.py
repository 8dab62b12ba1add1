"""The assembly of a softmax's weights: exponentials and hyperbolic tangents in the processor's vectors."""

from collections.abc import Callable

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import Vectors

# Below this, tanh(x) is x plus an odd polynomial; above it, exponentials are exact enough.
_SMALL = 0.625


def soften_functions(vectors: Vectors) -> list[str]:
    """Return ``soften(scores, mask, begin, end, softcap, sink, start)`` and what it calls.

    It replaces a row's scores from slot ``begin`` on, a multiple of the lanes, to before slot ``end``, by ``exp(score -
    largest score)``, the ``sink`` among the scores, and stores that of the sink at ``start``. A score x is first
    bounded to ``softcap * tanh(x / softcap)``, unless ``softcap`` is 0. Slots whose byte of the mask is 0 get exactly
    0, whatever their scores are. Scores and mask continue to a multiple of the lanes, and the mask with zeros.
    """
    return [_exponential(vectors), _tangent(vectors), _soften(vectors)]


def _soften(vectors: Vectors) -> str:
    lanes, wide = vectors.lanes, vectors.wide
    operands = "ptr %scores, ptr %mask, i64 %begin, i64 %end, float %softcap, float %sink, ptr %start"
    code = Code(f"internal void @soften({operands}) #0")
    cap = vectors.spread(code, "%softcap")
    has_cap = code.value("fcmp one float %softcap, 0.0")
    code.branch(has_cap, "capped", "masked")
    code.start("capped")
    with code.repeated("each_capped", "%begin", "%end", lanes) as scores:
        place = code.at("float", "%scores", scores.index)
        ratio = code.value(f"fdiv {wide} {code.load(wide, place, 4)}, {cap}")
        tangent = code.value(f"call {wide} @tangent({wide} {ratio})")
        code.effect(f"store {wide} {code.value(f'fmul {wide} {tangent}, {cap}')}, ptr {place}, align 4")
    code.effect("br label %masked")
    code.start("masked")
    lowest, sink = vectors.constant(float("-inf")), vectors.spread(code, "%sink")
    with code.repeated("each_score", "%begin", "%end", lanes, (wide, sink)) as scores:
        place = code.at("float", "%scores", scores.index)
        bytes_ = code.load(f"<{lanes} x i8>", code.at("i8", "%mask", scores.index), 1)
        is_seen = code.value(f"icmp ne <{lanes} x i8> {bytes_}, zeroinitializer")
        # Selected, not added: a hidden slot's score may be any value and must not count.
        choice = f"<{lanes} x i1> {is_seen}, {wide} {code.load(wide, place, 4)}, {wide} {lowest}"
        score = code.value(f"select {choice}")
        code.effect(f"store {wide} {score}, ptr {place}, align 4")
        scores.left = _greater(code, vectors, scores.held, score)
    highest = _everywhere(code, vectors, scores.held, _greater)
    with code.repeated("each_weight", "%begin", "%end", lanes) as weights:
        place = code.at("float", "%scores", weights.index)
        below = code.value(f"fsub {wide} {code.load(wide, place, 4)}, {highest}")
        weight = code.value(f"call {wide} @exponential({wide} {below})")
        code.effect(f"store {wide} {weight}, ptr {place}, align 4")
    below = code.value(f"fsub {wide} {sink}, {highest}")
    weight = code.value(f"call {wide} @exponential({wide} {below})")
    code.effect(f"store float {code.value(f'extractelement {wide} {weight}, i32 0')}, ptr %start, align 4")
    code.effect("ret void")
    return code.text()


def _exponential(vectors: Vectors) -> str:
    """Return ``exponential(x)`` for x up to 0, exact to two units in the last place; 0 below -87.

    Cephes' expf (https://www.netlib.org/cephes): e**x is 2**n * e**r, r within half of log 2, and e**r a polynomial.
    """
    lanes, wide = vectors.lanes, vectors.wide
    code = Code(f"internal {wide} @exponential({wide} %x) #0")
    is_low = code.value(f"fcmp olt {wide} %x, {vectors.constant(-87.0)}")
    x = code.value(f"select <{lanes} x i1> {is_low}, {wide} {vectors.constant(-87.0)}, {wide} %x")
    # Adding 1.5 * 2**23 rounds away the fraction.
    shift = vectors.constant(12582912.0)
    shifted = vectors.multiply_add(code, x, vectors.constant(1.44269504088896341), shift)
    whole = code.value(f"fsub {wide} {shifted}, {shift}")
    rest = vectors.multiply_add(code, whole, vectors.constant(-0.693359375), x)
    rest = vectors.multiply_add(code, whole, vectors.constant(2.12194440e-4), rest)
    factors = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
    polynomial = _polynomial(code, vectors, rest, (*factors, 1.0, 1.0))
    integers = f"<{lanes} x i32>"
    exponent = code.value(f"fptosi {wide} {whole} to {integers}")
    biased = code.value(f"add {integers} {exponent}, <{', '.join(['i32 127'] * lanes)}>")
    bits = code.value(f"shl {integers} {biased}, <{', '.join(['i32 23'] * lanes)}>")
    power = code.value(f"bitcast {integers} {bits} to {wide}")
    result = code.value(f"fmul {wide} {polynomial}, {power}")
    code.effect(f"ret {wide} {code.value(f'select <{lanes} x i1> {is_low}, {wide} zeroinitializer, {wide} {result}')}")
    return code.text()


def _tangent(vectors: Vectors) -> str:
    """Return ``tangent(x)``, the hyperbolic tangent.

    Cephes' tanhf: near 0 an odd polynomial, elsewhere 1 - 2 e / (1 + e) with e = exp(-2 |x|), and the sign of x.
    """
    lanes, wide, integers = vectors.lanes, vectors.wide, f"<{vectors.lanes} x i32>"
    code = Code(f"internal {wide} @tangent({wide} %x) #0")
    bits = code.value(f"bitcast {wide} %x to {integers}")
    unsigned = code.value(f"and {integers} {bits}, <{', '.join([f'i32 {2**31 - 1}'] * lanes)}>")
    size = code.value(f"bitcast {integers} {unsigned} to {wide}")
    twice = code.value(f"fmul {wide} {size}, {vectors.constant(-2.0)}")
    power = code.value(f"call {wide} @exponential({wide} {twice})")
    one = vectors.constant(1.0)
    above, below = (code.value(f"{each} {wide} {one}, {power}") for each in ("fsub", "fadd"))
    large = code.value(f"fdiv {wide} {above}, {below}")
    square = code.value(f"fmul {wide} {size}, {size}")
    factors = -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1
    polynomial = _polynomial(code, vectors, square, factors)
    cubed = code.value(f"fmul {wide} {square}, {size}")
    small = vectors.multiply_add(code, polynomial, cubed, size)
    is_small = code.value(f"fcmp olt {wide} {size}, {vectors.constant(_SMALL)}")
    result = code.value(f"select <{lanes} x i1> {is_small}, {wide} {small}, {wide} {large}")
    result_bits = code.value(f"bitcast {wide} {result} to {integers}")
    sign = code.value(f"and {integers} {bits}, <{', '.join([f'i32 {-(2**31)}'] * lanes)}>")
    signed = code.value(f"or {integers} {result_bits}, {sign}")
    code.effect(f"ret {wide} {code.value(f'bitcast {integers} {signed} to {wide}')}")
    return code.text()


def _polynomial(code: Code, vectors: Vectors, of: str, factors: tuple[float, ...]) -> str:
    """Append a polynomial by Horner's rule, the factor of the highest power first."""
    value = vectors.constant(factors[0])
    for factor in factors[1:]:
        value = vectors.multiply_add(code, value, of, vectors.constant(factor))
    return value


def _greater(code: Code, vectors: Vectors, one: str, other: str) -> str:
    is_greater = code.value(f"fcmp ogt {vectors.wide} {one}, {other}")
    return code.value(f"select <{vectors.lanes} x i1> {is_greater}, {vectors.wide} {one}, {vectors.wide} {other}")


def _everywhere(code: Code, vectors: Vectors, vector: str, join: Callable[[Code, Vectors, str, str], str]) -> str:
    """Return the combination of all lanes, in each lane."""
    distance = 1
    while distance < vectors.lanes:
        mask = ", ".join(f"i32 {lane ^ distance}" for lane in range(vectors.lanes))
        turned = code.value(
            f"shufflevector {vectors.wide} {vector}, {vectors.wide} poison, <{vectors.lanes} x i32> <{mask}>"
        )
        vector = join(code, vectors, vector, turned)
        distance *= 2
    return vector
