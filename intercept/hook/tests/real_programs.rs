//! Unmodified programs and libraries above CUDA, on the fake driver: without the interceptor and
//! behind it in every mode. `make real-programs` installs them and runs this
//! (`testing/real-programs/README.md`).

mod container;

use std::path::{Path, PathBuf};
use std::process::Command;

use container::{GIB, MIB, Mode, Node, lines_of, namespaces_error};
use serde_json::Value;
use tessera_test_support::report_skip;

/// The grant of each program, without the memory of contexts.
const LIMIT: u64 = 2 * GIB;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testing/real-programs")
}

/// Returns the Python of an installed stack, or `None` if the stack is not requested or cannot be
/// installed on this machine, which is reported.
fn python(stack: &str) -> Option<PathBuf> {
    let asked = std::env::var("TESSERA_REAL_STACKS").unwrap_or_default();
    if !asked.is_empty() && !asked.split(',').any(|asked| asked == stack) {
        println!("stack {stack} is not requested (REAL={asked})");
        return None;
    }
    let into = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../real-programs");
    let output = Command::new(directory().join("install.sh"))
        .arg(stack)
        .arg(into)
        .output()
        .expect("the script runs");
    match output.status.code() {
        Some(0) => {
            let place = String::from_utf8(output.stdout).expect("a path");
            Some(Path::new(place.trim()).join("bin/python"))
        }
        Some(3) => {
            let reason = String::from_utf8_lossy(&output.stderr);
            report_skip("real-programs", reason.trim());
            None
        }
        _ => panic!("install.sh {stack}: {output:?}"),
    }
}

/// The output of a program, and its ledger.
struct Run {
    mode: Mode,
    lines: Vec<Value>,
    peak_bytes: u64,
    used_bytes: u64,
    unknown_functions: u64,
}

/// Runs a program of a stack in one mode, with a share of each of the first GPUs.
fn run(python: &Path, mode: Mode, program: &[&str], gpus: usize) -> Run {
    let node = Node::new();
    let limit = LIMIT + node.context_bytes();
    let shares: Vec<_> = (0..gpus).map(|gpu| node.share_with_contexts_of(gpu, limit)).collect();
    let script = directory().join("programs").join(program[0]);
    let mut arguments = vec![script.to_str().expect("text")];
    arguments.extend(&program[1..]);
    let container = match mode {
        Mode::Bare => node.container_without_library().with_own_devices(),
        mode => node.container_in(mode, &shares.iter().collect::<Vec<_>>()),
    };
    let output = container.with_device_node().with_timeout(300).run(python, &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program:?} in {mode:?}: {}; {error}", output.status);
    assert!(!error.contains("panicked"), "{program:?} in {mode:?}: {error}");
    shares[0].ledger(|ledger| Run {
        mode,
        lines: sorted(lines_of(&output)),
        peak_bytes: ledger.peak_bytes(),
        used_bytes: ledger.processes().map(|process| process.used_bytes).sum(),
        unknown_functions: ledger.unknown_functions(),
    })
}

/// Returns the lines of several processes in an order of their own.
fn sorted(mut lines: Vec<Value>) -> Vec<Value> {
    if lines.iter().any(|line| line.get("rank").is_some()) {
        lines.sort_by_key(|line| line.get("rank").and_then(Value::as_u64));
    }
    lines
}

/// As [`check_on`], with one GPU.
fn check(stack: &str, program: &[&str]) -> Option<Vec<Value>> {
    check_on(stack, program, 1)
}

/// Runs a program without the interceptor, and in all modes: held to its grants, it prints the same
/// in all of them.
fn check_on(stack: &str, program: &[&str], gpus: usize) -> Option<Vec<Value>> {
    if let Some(error) = namespaces_error() {
        panic!("containers cannot run here: {error}");
    }
    let python = python(stack)?;
    let bare = run(&python, Mode::Bare, program, gpus);
    let limit = total();
    let held = Mode::INTERCEPTED.map(|mode| run(&python, mode, program, gpus));
    for run in &held {
        let what = format!("{program:?} in {:?}", run.mode);
        assert_eq!(run.lines, held[0].lines, "{what}");
        assert!(run.peak_bytes > 0 && run.peak_bytes <= limit, "{what}: peak {}", run.peak_bytes);
        assert_eq!(run.unknown_functions, 0, "{what}");
        assert!(run.used_bytes <= limit, "{what}: {} of a dead process", run.used_bytes);
    }
    assert_eq!(bare.lines.len(), held[0].lines.len(), "{program:?}: {:?}", bare.lines);
    let [first, ..] = held;
    Some(first.lines)
}

/// Returns the value of a field of the only line that has it.
fn field<'l>(lines: &'l [Value], name: &str) -> &'l Value {
    let mut found = lines.iter().filter_map(|line| line.get(name));
    let value = found.next().unwrap_or_else(|| panic!("no line has {name}: {lines:?}"));
    assert!(found.next().is_none(), "{name} is in several lines: {lines:?}");
    value
}

/// Returns the total memory that a program sees under its grant.
fn total() -> u64 {
    LIMIT + Node::new().context_bytes()
}

fn runtime_holds(library: &str) {
    let Some(lines) = check("runtime", &["cuda_runtime.py", library]) else { return };
    assert_eq!(field(&lines, "devices"), 0);
    assert_eq!(field(&lines, "begin")["total"], total());
    assert_eq!(field(&lines, "begin")["free"], LIMIT);
    assert_eq!((field(&lines, "refused"), field(&lines, "held")), (&2.into(), &LIMIT.into()));
    assert_eq!(
        (field(&lines, "freed"), &field(&lines, "end")["free"]),
        (&true.into(), &LIMIT.into())
    );
    assert_eq!(field(&lines, "stream"), &serde_json::json!([0, 0, 0, 0, 0]));
}

#[test]
fn cuda_runtime_11_is_held() {
    runtime_holds("libcudart.so.11.0");
}

#[test]
fn cuda_runtime_12_is_held() {
    runtime_holds("libcudart.so.12");
}

#[test]
fn cuda_runtime_13_is_held() {
    runtime_holds("libcudart.so.13");
}

#[test]
fn cupy_is_held_and_recovers_from_a_full_share() {
    let Some(lines) = check("arrays", &["cupy_arrays.py"]) else { return };
    assert_eq!(field(&lines, "total"), total());
    assert_eq!(field(&lines, "oom"), "OutOfMemoryError");
    assert_eq!(field(&lines, "asynchronous"), "OutOfMemoryError");
    assert!(["success", "OutOfMemoryError"].iter().any(|result| field(&lines, "late") == result));
    assert_eq!((field(&lines, "after"), field(&lines, "freed")), (&16.into(), &true.into()));
    assert_eq!(field(&lines, "graph"), "launched");
}

#[test]
fn numba_is_held_and_recovers_from_a_full_share() {
    let Some(lines) = check("arrays", &["numba_kernels.py"]) else { return };
    assert_eq!(field(&lines, "total"), total());
    let held = field(&lines, "held").as_u64().expect("bytes");
    assert!(held > LIMIT - 128 * MIB && held <= LIMIT, "{held}");
    assert_eq!(
        (field(&lines, "kernel"), field(&lines, "after")),
        (&"launched".into(), &"launched".into())
    );
}

#[test]
fn nvml_tools_see_the_share_and_their_own_processes() {
    let Some(lines) = check("tools", &["nvml_tools.py"]) else { return };
    assert_eq!(
        (field(&lines, "total"), field(&lines, "nvitop")),
        (&total().into(), &total().into())
    );
    assert_eq!((field(&lines, "processes"), field(&lines, "own")), (&1.into(), &true.into()));
    let used = Node::new().context_bytes() + 256 * MIB;
    assert_eq!(field(&lines, "used"), &Value::from(used));
}

/// PyTorch with an allocator that `configuration` selects.
fn pytorch_holds(configuration: &[&str]) -> Option<Vec<Value>> {
    let lines = check("torch", &[&["torch_tensors.py"], configuration].concat())?;
    let error = "OutOfMemoryError";
    assert_eq!((field(&lines, "oom"), field(&lines, "small")), (&error.into(), &error.into()));
    let late = lines.iter().filter(|line| line.get("late").is_some());
    for line in late {
        assert!(line["result"] == "success" || line["result"] == error, "{line}");
    }
    assert_eq!(field(&lines, "after"), &serde_json::json!([[256], [256]]));
    assert_eq!(field(&lines, "graph"), "replayed");
    Some(lines)
}

#[test]
fn pytorch_is_held_and_recovers_from_a_full_share() {
    let Some(lines) = pytorch_holds(&[]) else { return };
    assert_eq!(field(&lines, "shared"), 64 * MIB);
}

#[test]
fn pytorch_with_expandable_segments_is_held() {
    let Some(lines) = pytorch_holds(&["expandable_segments:True"]) else { return };
    assert_eq!(field(&lines, "shared"), 64 * MIB);
}

#[test]
fn pytorch_with_pools_of_the_driver_is_held() {
    pytorch_holds(&["backend:cudaMallocAsync"]);
}

#[test]
fn compilers_of_pytorch_recover_from_a_full_share() {
    let Some(lines) = check("torch", &["torch_compiled.py"]) else { return };
    assert_eq!(
        (field(&lines, "oom"), field(&lines, "late")),
        (&"OutOfMemoryError".into(), &3.into())
    );
    assert_eq!(field(&lines, "after"), &serde_json::json!([true, true, true]));
}

#[test]
fn tensorflow_is_held_and_recovers_from_a_full_share() {
    let Some(lines) = check("tensorflow", &["tensorflow_tensors.py"]) else { return };
    let error = "ResourceExhaustedError";
    assert_eq!((field(&lines, "device"), field(&lines, "oom")), (&"GPU:0".into(), &error.into()));
    let held = field(&lines, "held").as_u64().expect("bytes");
    assert!(held > LIMIT / 2 && held <= LIMIT, "{held}");
    assert_eq!(field(&lines, "late"), 2);
    assert_eq!(field(&lines, "after"), &serde_json::json!([true, true]));
    assert_eq!(field(&lines, "host"), &serde_json::json!([512, 512]));
}

#[test]
fn jax_is_held_and_recovers_from_a_full_share() {
    let Some(lines) = check("jax", &["jax_arrays.py"]) else { return };
    assert_eq!(field(&lines, "platform"), "gpu");
    // It takes three quarters of the memory at once.
    let reserved = field(&lines, "limit").as_u64().expect("bytes");
    assert!(reserved > total() / 2 && reserved <= total() * 3 / 4, "{reserved}");
    let held = field(&lines, "held").as_u64().expect("bytes");
    assert!(held > reserved - 256 * MIB && held <= reserved, "{held} of {reserved}");
    let error = "JaxRuntimeError";
    assert_eq!(field(&lines, "oom"), error);
    assert!(["success", error].iter().any(|result| field(&lines, "late") == result));
    let shape = serde_json::json!([512, 512]);
    assert_eq!((field(&lines, "after"), field(&lines, "host")), (&shape, &shape));
}

#[test]
fn onnx_runtime_is_held_and_recovers_from_a_full_share() {
    let Some(lines) = check("onnx", &["onnx_session.py"]) else { return };
    let shape = serde_json::json!([16, 256]);
    assert_eq!(field(&lines, "provider"), "CUDAExecutionProvider");
    let held = field(&lines, "held").as_u64().expect("bytes");
    assert!(held > LIMIT / 2 && held <= LIMIT, "{held}");
    assert_eq!((field(&lines, "still"), field(&lines, "after")), (&shape, &shape));
}

#[test]
fn nccl_runs_between_two_shares() {
    let Some(lines) = check_on("torch", &["torch_nccl.py"], 2) else { return };
    let ranks: Vec<_> = lines.iter().filter(|line| line.get("rank").is_some()).collect();
    assert_eq!(ranks.len(), 2, "{lines:?}");
    for rank in ranks {
        assert_eq!((&rank["total"], &rank["held"]), (&total().into(), &true.into()));
        assert_eq!(rank["oom"], "OutOfMemoryError");
        assert_eq!(rank["gradients"], 16, "of 8 layers by DistributedDataParallel");
    }
    assert_eq!(field(&lines, "processes"), "ended");
}

/// vLLM takes seven tenths of the share. It refuses to begin with 99 %, which are not free.
#[test]
fn vllm_profiles_the_memory_of_the_share() {
    let Some(lines) = check("vllm", &["vllm_engine.py"]) else { return };
    assert_eq!(
        (field(&lines, "too_much"), field(&lines, "tokens")),
        (&"ValueError".into(), &4.into())
    );
    assert_eq!(field(&lines, "total"), total());
    let reserved = field(&lines, "reserved").as_u64().expect("bytes");
    assert!(reserved > total() / 4 && reserved <= total() * 7 / 10, "{reserved}");
}

/// The job of `bench/ai-benchmark`.
#[test]
fn ai_benchmark_runs_in_a_share() {
    let Some(lines) = check("torch", &["ai_benchmark.py"]) else { return };
    let cases: Vec<_> = lines.iter().filter(|line| line.get("case").is_some()).collect();
    assert_eq!(cases.len(), 10, "{cases:?}");
    assert!(cases.iter().all(|line| line["result"] == "rate"), "{cases:?}");
    assert_eq!(field(&lines, "table"), 10);
}
