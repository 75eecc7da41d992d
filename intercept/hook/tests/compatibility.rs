//! The page of programs above CUDA that `make real-programs` checks (`real_programs.rs`).

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// A program above CUDA that is checked here.
struct Program {
    name: &'static str,
    /// The lock file with its packages.
    stack: &'static str,
    /// Packages whose versions are named.
    packages: &'static [&'static str],
    /// The behaviour that is checked without the interceptor and in all modes.
    checked: &'static str,
}

/// The programs of this suite, in the order of the page.
const PROGRAMS: [Program; 11] = [
    Program {
        name: "CUDA runtime 11, 12 and 13",
        stack: "runtime",
        packages: &["nvidia-cuda-runtime-cu11", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"],
        checked: "devices, memory, the limit (error 2), memory given back, pools, streams",
    },
    Program {
        name: "NVML tools",
        stack: "tools",
        packages: &["nvidia-ml-py", "nvitop"],
        checked: "total and used memory, the container's own processes with their PIDs",
    },
    Program {
        name: "CuPy (NVRTC)",
        stack: "arrays",
        packages: &["cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"],
        checked: "kernels, `OutOfMemoryError` in both pools, a new operator with a full share and after, a graph",
    },
    Program {
        name: "Numba",
        stack: "arrays",
        packages: &["numba-cuda", "numba", "cuda-core"],
        checked: "a compiled kernel, the limit, the kernel after that",
    },
    Program {
        name: "PyTorch (cuBLAS, cuDNN)",
        stack: "torch",
        packages: &["torch", "nvidia-cublas", "nvidia-cudnn-cu13", "triton"],
        checked: "with its own allocator, with expandable segments and with `cudaMallocAsync`: `torch.OutOfMemoryError`, new operators with a full share and after, a graph; a tensor shared with another process (not `cudaMallocAsync`); the ten cases of [ai-benchmark](../../bench/ai-benchmark/README.md)",
    },
    Program {
        name: "Triton, Inductor, cuFFT",
        stack: "torch",
        packages: &["triton", "torch", "nvidia-cufft"],
        checked: "a kernel, a compiled function and a transform that the program meets with a full share, and after",
    },
    Program {
        name: "NCCL",
        stack: "torch",
        packages: &["nvidia-nccl-cu13", "torch"],
        checked: "two processes on two shares: collectives of `torch.distributed`, one of them with full shares, one in a graph; training with `DistributedDataParallel`, with `init_sync=False` because it compares the models otherwise",
    },
    Program {
        name: "JAX (XLA, cuDNN)",
        stack: "jax",
        packages: &["jax", "jax-cuda12-plugin", "nvidia-cudnn-cu12", "nvidia-cuda-nvcc-cu12"],
        checked: "preallocation of a part of the share, `JaxRuntimeError`, a new function with a full share and after, a transfer; without XLA's autotuning, which compares results",
    },
    Program {
        name: "TensorFlow (cuBLAS, cuDNN, cuFFT, cuSOLVER)",
        stack: "tensorflow",
        packages: &["tensorflow", "nvidia-cudnn-cu12", "nvidia-cufft-cu12", "nvidia-cusolver-cu12"],
        checked: "with memory growth, and `TF_DEVICE_MIN_SYS_MEMORY_IN_MB=512` because it leaves 1.8 GiB of a H100 unused otherwise: `ResourceExhaustedError`, new operators with a full share and after, a transfer",
    },
    Program {
        name: "ONNX Runtime (cuBLAS, cuDNN)",
        stack: "onnx",
        packages: &["onnxruntime-gpu", "nvidia-cublas", "nvidia-cudnn-cu13"],
        checked: "sessions on `CUDAExecutionProvider`, its own error at the limit, sessions with a full share and after",
    },
    Program {
        name: "vLLM",
        stack: "vllm",
        packages: &["vllm", "torch", "triton"],
        checked: "a small model without weights: the engine profiles its memory and takes a part of the share, `ValueError` for a part that is not free, four tokens; without FlashInfer, which needs nvcc",
    },
];

/// Programs that are not in this suite, with the reason.
const NOT_CHECKED: [(&str, &str); 4] = [
    ("gpustat", "no wheel on the Python package index"),
    ("llama.cpp (llama-cpp-python)", "no wheel with CUDA on the Python package index"),
    ("MXNet", "no release since 2022; its wheels need CUDA 11.2 and Python 3.8"),
    ("MindSpore", "its wheels on the Python package index have no CUDA"),
];

/// Returns the version of a package in a lock file.
fn version(stack: &str, package: &str) -> String {
    let lock = directory().join("stacks").join(format!("{stack}.lock"));
    let lock = std::fs::read_to_string(lock).expect("a lock file");
    let versions = lock.lines().filter_map(|line| line.strip_prefix(package)?.strip_prefix("=="));
    let version = versions.map(|rest| rest.split([' ', ';']).next().expect("a version")).next();
    version.unwrap_or_else(|| panic!("{package} is not in {stack}.lock")).to_owned()
}

fn page() -> String {
    let mut page = String::from(
        "# Programs above CUDA\n\n\
         Written by the test `compatibility` of `intercept/hook`; `UPDATE=1` writes it anew.\n\n\
         Unmodified packages on the fake driver (8 H100, CUDA 13.0), with a grant of 2 GiB: without the\n\
         interceptor, and in the modes `preload`, `proxy` and `both`, which print the same. Results of\n\
         kernels mean nothing there; calls, errors and memory do. Never run on a GPU. `make real-programs`\n\
         repeats it.\n\n\
         | program | versions | checked |\n|---|---|---|\n",
    );
    for Program { name, stack, packages, checked } in &PROGRAMS {
        let versions: Vec<_> = packages
            .iter()
            .map(|package| format!("{package} {}", version(stack, package)))
            .collect();
        writeln!(page, "| {name} | {} | {checked} |", versions.join(", ")).expect("a string");
    }
    page.push_str("\nNot checked:\n\n| program | why |\n|---|---|\n");
    for (name, why) in NOT_CHECKED {
        writeln!(page, "| {name} | {why} |").expect("a string");
    }
    page
}

#[test]
fn page_of_programs_is_up_to_date() {
    let path = directory().join("../../docs/reference/compatibility.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, page()).expect("written");
    }
    let written = std::fs::read_to_string(&path).expect("the page");
    assert!(written == page(), "{} is out of date; if that is meant: UPDATE=1", path.display());
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testing/real-programs")
}
