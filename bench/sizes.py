"""The sizes that are measured by default, as text: the report needs neither torch nor the kernels."""

#: What a shape's sizes are, by what the chain begins with.
FORMS = {
    "GEMM": "batch x in_features x out_features",
    "convolution": "batch x in_channels x out_channels x height x width x kernel",
    "norm": "batch x channels x ...",
    "batch": "matrices x rows x terms x columns",
}
#: Shapes by what the chain begins with: of the four chains with a name on a GPU, and of all in Triton's interpreter.
TARGET = {"GEMM": "1024x8192x8192", "convolution": "128x64x64x256x256x3"}
SMALL = {"GEMM": "8x64x64", "convolution": "2x16x16x5x6x3", "norm": "2x64x5x6"}

#: The growth grid of Linear chains: every batch with every number of features, in and out.
GRID_BATCHES = (1, 16, 64, 256, 1024, 4096)
GRID_FEATURES = (1024, 2048, 4096, 8192, 16384)
GRID_DTYPES = ("bfloat16", "float32")
#: Its cells by shape: (batch, features).
GRID = {f"{batch}x{size}x{size}": (batch, size) for batch in GRID_BATCHES for size in GRID_FEATURES}


#: Products of batches: attention's scores, and the values that they weigh; and one of few columns.
MATRICES = (
    *("96x512x64x512", "96x512x512x64", "96x1024x128x1024", "96x1024x1024x128", "32x2048x64x2048", "32x2048x2048x64"),
    "1x65536x256x256",
)


def sizes_of(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))
