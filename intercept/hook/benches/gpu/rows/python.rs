//! PyTorch, and what stands on it, where `python3` has it.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::memory::{AGREE, FULL, full};
use super::overheads::{AS_MUCH, work};
use super::programs::PYTHON;
use super::{FAILED, Harness, Kind, MIB, NO_CAP, TIMEOUT, absent, judged, mib, number};
use crate::container::{self, Container, Mode, NodeShare};

/// A program beside these files, under another name: in a directory of its modules' names it would
/// import itself.
pub(crate) struct Script {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// Script that succeeds if this machine can run it.
    pub(crate) test: &'static str,
    /// Text of rows if not.
    lacks: &'static str,
}

pub(crate) const TORCH: Script = Script {
    name: "bench_torch.py",
    text: include_str!("../torch.py"),
    test: "import torch, sys; sys.exit(not torch.cuda.is_available())",
    lacks: "no PyTorch for `python3` with CUDA here",
};

pub(crate) const TRITON: Script = Script {
    name: "bench_triton.py",
    text: include_str!("../triton.py"),
    test: "import torch, triton, sys; sys.exit(not torch.cuda.is_available())",
    lacks: "no Triton for `python3` with CUDA here",
};

pub(crate) const NCCL: Script = Script {
    name: "bench_nccl.py",
    text: include_str!("../nccl.py"),
    test: "import torch, torch.distributed as d, sys; \
           sys.exit(not (torch.cuda.is_available() and d.is_available() and d.is_nccl_available()))",
    lacks: "no PyTorch with NCCL for `python3` here",
};

pub(super) const PYTORCH: Kind = Kind {
    rows: &[
        ("PyTorch: a context, after a product of matrices", ""),
        ("PyTorch: filled until refused, on the GPU itself", FULL),
        ("PyTorch: the same by `mem_get_info`, NVML and `nvidia-smi` in the container", AGREE),
        ("PyTorch: products of matrices of 4096", AS_MUCH),
    ],
    find: |harness| pytorch(harness, Mode::Preload, preloaded),
};

impl Script {
    /// Returns the reason for which it cannot run here. Tested outside of containers.
    fn lacks(&self, harness: &Harness<'_>) -> Option<String> {
        let Some(python) = &harness.programs.python else { return Some(absent(PYTHON)) };
        let tried = Command::new(python).args(["-c", self.test]).output();
        let can = tried.is_ok_and(|output| output.status.success());
        (!can).then(|| self.lacks.to_owned())
    }

    /// Returns the arguments of `timeout` in a container. Compiled kernels are not cached.
    fn arguments(&self, harness: &Harness<'_>, arguments: &[&str]) -> Vec<String> {
        let path = harness.node.path().join(self.name);
        fs::write(&path, self.text).expect("written");
        let cache = tempfile::TempDir::new_in(harness.node.path()).expect("a directory").keep();
        let set = format!("TRITON_CACHE_DIR={}", cache.display());
        let first = [
            TIMEOUT.to_string(),
            "env".to_owned(),
            set,
            PYTHON.to_owned(),
            path.display().to_string(),
        ];
        first.into_iter().chain(arguments.iter().map(|&argument| argument.to_owned())).collect()
    }

    /// Runs it to its end; its last line.
    fn run(
        &self,
        harness: &Harness<'_>,
        container: &Container<'_>,
        arguments: &[&str],
    ) -> Result<Value, String> {
        let arguments = self.arguments(harness, arguments);
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let output = container.run("timeout", &arguments);
        let said = String::from_utf8_lossy(&output.stdout);
        let line = said.lines().next_back().and_then(|line| serde_json::from_str(line).ok());
        line.filter(|_| output.status.success()).ok_or_else(|| container::last_line(&output))
    }
}

/// All rows of a way to stand, or for each what PyTorch lacks.
pub(super) fn pytorch<const N: usize>(
    harness: &Harness<'_>,
    mode: Mode,
    rows: fn(&Filled, String) -> [String; N],
) -> Vec<String> {
    match TORCH.lacks(harness) {
        Some(lacks) => vec![lacks; N],
        None => rows(&Filled::find(harness, mode), products(harness, mode)).into(),
    }
}

fn preloaded(filled: &Filled, products: String) -> [String; 4] {
    [mib(filled.context), full(filled.held, filled.cap), filled.as_seen(), products]
}

pub(super) fn in_the_drivers_place(filled: &Filled, products: String) -> [String; 2] {
    [full(filled.held, filled.cap), products]
}

/// PyTorch in a container that it has filled.
pub(super) struct Filled {
    cap: f64,
    /// GPU memory that it took before its tensors.
    context: f64,
    /// On the GPU, beside what was there before.
    held: f64,
    said: Value,
}

impl Filled {
    fn find(harness: &Harness<'_>, mode: Mode) -> Self {
        let cap = harness.quarter();
        let [empty, full] =
            ["empty", "full"].map(|id| harness.share(&format!("torch-{id}-{mode:?}"), cap, 100));
        let (context, said) = Self::hold(harness, mode, &empty, "context");
        let context = context - number(&said, "reserved");
        let (held, said) = Self::hold(harness, mode, &full, "fill");
        Self { cap: cap as f64, context, held, said }
    }

    /// Returns the additional GPU memory in use while the program waits, and the program's output.
    fn hold(harness: &Harness<'_>, mode: Mode, share: &NodeShare, what: &str) -> (f64, Value) {
        let before = harness.used();
        let arguments = TORCH.arguments(harness, &[what, &harness.gpu.uuid.to_string()]);
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let mut running = harness.container(mode, share).start("timeout", &arguments);
        let said = running.wait_for_field("reserved");
        (harness.used() - before, said)
    }

    /// `nvidia-smi` rounds to MiB, and is not everywhere.
    fn as_seen(&self) -> String {
        let [by_torch, by_nvml, total] =
            ["torchUsed", "nvmlUsed", "total"].map(|field| number(&self.said, field));
        let smi = self.said["smi"].as_str();
        let by_smi: Option<f64> = smi.and_then(|text| text.trim().parse().ok());
        let smi_agrees = by_smi.is_none_or(|mib| (mib - by_nvml / MIB as f64).abs() <= 1.0);
        let seen = by_smi.map_or_else(
            || "no `nvidia-smi`".to_owned(),
            |mib| format!("{mib:.0} MiB by `nvidia-smi`"),
        );
        let figure =
            format!("{} by `mem_get_info`, {} by NVML, {seen}", mib(by_torch), mib(by_nvml));
        judged(&figure, by_torch == by_nvml && smi_agrees && total == self.cap)
    }
}

fn products(harness: &Harness<'_>, mode: Mode) -> String {
    let run =
        |container: &Container<'_>| TORCH.run(harness, container, &["products"]).expect("products");
    let [products] = harness.in_turn(mode, NO_CAP, ["products"], run);
    work(products)
}

/// Returns the result of a script with proxies, which must be right if it is without them.
pub(super) fn is_right(harness: &Harness<'_>, script: &Script) -> String {
    if let Some(lacks) = script.lacks(harness) {
        return lacks;
    }
    if let Err(said) = script.run(harness, &harness.node.container_without_library(), &[]) {
        return format!("fails here without the library, too: `{said}`");
    }
    let share = harness.share(script.name, harness.quarter(), 100);
    match script.run(harness, &harness.container(Mode::Proxy, &share), &[]) {
        Ok(said) => judged(
            &format!("{} of {} right", said["right"], said["of"]),
            said["right"] == said["of"],
        ),
        Err(said) => {
            eprintln!("{}: {said}", script.name);
            FAILED.to_owned()
        }
    }
}
