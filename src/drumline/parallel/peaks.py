"""What GPUs could compute at best, for MFU. To add one, add a line."""

# Dense bf16 peak in TFLOP/s from the makers' data sheets, by a part of the name that CUDA reports.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}
