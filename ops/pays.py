"""When a fused call is faster than PyTorch's layers on the wall: one rule of bytes, launches and the host's time."""

#: What an elementwise kernel of eager PyTorch moves in a second (an H200; two thirds of its memory's bandwidth).
BYTES_PER_SECOND = 4e12
#: What its launch takes beside that, in seconds.
LAUNCH = 5e-6
#: How much longer the host takes for a captured call with a chain than for its layers, in seconds. Of 48 us, 41 are the
#: guards of Dynamo (an H200's host, torch 2.11: Linear, LayerNorm and GELU of 16 x 256).
CAPTURED_CALL = 48e-6


def reason_to_leave(moved: float, launches: int, host: float = CAPTURED_CALL) -> str:
    """Why a chain is left to PyTorch, in words; "" where a fused call is faster.

    Args:
        moved: The bytes that PyTorch's layers move and the call does not.
        launches: The kernels that they launch and it does not.
        host: How much longer it takes the host, in seconds.
    """
    saved = moved / BYTES_PER_SECOND + launches * LAUNCH
    if saved > host:
        return ""
    return (
        f"left to PyTorch: {moved / 1e6:.1f} MB and {launches} launches would be saved, some {saved * 1e6:.0f} us, "
        f"and the call takes the host {host * 1e6:.0f} us more"
    )
