//! Memory that a container gets, and the reports of it.

use tessera_intercept_abi::Grant;

use super::programs::SMI;
use super::{Harness, Kind, absent, judged, mib, number, smi};
use crate::container::{self, MIB, Mode, NodeShare};

/// The goal of who is filled.
pub(super) const FULL: &str = "99 to 100 % of the cap";
/// The goal of those who say something of the same.
pub(super) const AGREE: &str = "agree";

pub(super) const CONTEXTS: Kind = Kind {
    rows: &[
        ("a context, of a program that has done nothing", ""),
        ("the same after a module and a launch: what a grant should charge", ""),
    ],
    find: contexts,
};

pub(super) const FILL: Kind = Kind {
    rows: &[
        ("filled to the cap, on the GPU itself", FULL),
        ("the same, as the program sees it", AGREE),
        ("the same, as `nvidia-smi` sees it in the container", AGREE),
    ],
    find: |harness| {
        let share = harness.share("fill", harness.quarter(), 100);
        let filled = Filled::find(harness, Mode::Preload, &share);
        let smi = filled.by_smi.clone().unwrap_or_else(|| absent(SMI));
        vec![filled.on_the_gpu(), filled.as_seen(), smi]
    },
};

pub(super) const MANAGED: Kind =
    Kind { rows: &[("filled to the cap with managed memory, in the ledger", FULL)], find: managed };

pub(super) const AGREEMENT: Kind = Kind {
    rows: &[(
        "what the ledger has and the driver not, at most, over pools, `cuMemCreate`, graphs",
        "2 MiB either way",
    )],
    find: agreement,
};

pub(super) const BEYOND: Kind = Kind {
    rows: &[("1.2 times the GPU's memory, written and read back", "no word is wrong")],
    find: beyond,
};

fn contexts(harness: &Harness<'_>) -> Vec<String> {
    let said = harness.bare(&["context"]);
    ["context", "worked"].map(|field| mib(number(&said, field))).into()
}

/// Measurements of a container that is filled to its cap.
pub(super) struct Filled {
    cap: f64,
    /// On the GPU, beside what was there before.
    held: f64,
    ledger: f64,
    by_cuda: f64,
    by_nvml: f64,
    /// A row's figure, where there is the program.
    by_smi: Option<String>,
}

impl Filled {
    pub(super) fn find(harness: &Harness<'_>, mode: Mode, share: &NodeShare) -> Self {
        let before = harness.used();
        let mut filled = harness.container(mode, share).start(&harness.program, &["fill"]);
        let said = filled.wait_for_field("taken");
        let [by_cuda, by_nvml] = ["cudaUsed", "nvmlUsed"].map(|field| number(&said, field));
        Self {
            cap: share.grant.memory_limit_bytes as f64,
            held: harness.used() - before,
            ledger: share.ledger(|ledger| ledger.used_bytes()) as f64,
            by_cuda,
            by_nvml,
            by_smi: harness
                .programs
                .smi
                .as_ref()
                .map(|_| smi::memory(harness, mode, share, by_nvml)),
        }
    }

    pub(super) fn on_the_gpu(&self) -> String {
        full(self.held, self.cap)
    }

    pub(super) fn as_seen(&self) -> String {
        let [cuda, nvml, ledger] = [self.by_cuda, self.by_nvml, self.ledger].map(mib);
        let seen = format!("{cuda} by `cuMemGetInfo`, {nvml} by NVML, {ledger} in the ledger");
        judged(&seen, self.by_cuda == self.by_nvml && self.by_nvml == self.ledger)
    }
}

/// Part of a cap that is taken.
pub(super) fn full(taken: f64, cap: f64) -> String {
    let part = taken / cap;
    judged(&format!("{:.2} % of {}", part * 100.0, mib(cap)), (0.99..=1.0).contains(&part))
}

/// It comes to the GPU when it is touched; until then only the ledger has it.
fn managed(harness: &Harness<'_>) -> Vec<String> {
    let share = harness.share("managed", harness.quarter(), 100);
    let mut filled =
        harness.container(Mode::Preload, &share).start(&harness.program, &["fill", "managed"]);
    filled.wait_for_field("taken");
    vec![full(share.ledger(|ledger| ledger.used_bytes()) as f64, harness.quarter() as f64)]
}

fn agreement(harness: &Harness<'_>) -> Vec<String> {
    let share = harness.share("claim-0", harness.quarter(), 100);
    let [bare, total_at, shift] = &harness.node.comparison_arguments();
    let arguments = ["agree", bare, total_at, shift];
    let steps = container::lines_of(
        &harness.container(Mode::Preload, &share).run(&harness.program, &arguments),
    );
    let apart = |step: &serde_json::Value| number(step, "ledger") - number(step, "driver");
    let worst = steps
        .iter()
        .max_by(|one, other| apart(one).abs().total_cmp(&apart(other).abs()))
        .expect("steps");
    let figure = format!("{} of {} steps, {worst}", mib(apart(worst)), steps.len());
    vec![judged(&figure, apart(worst).abs() <= 2.0 * MIB as f64)]
}

/// A grant of more than the GPU has: what does not fit lies on the host meanwhile.
fn beyond(harness: &Harness<'_>) -> Vec<String> {
    let bytes = harness.gpu.total_bytes / 10 * 12 / MIB * MIB;
    let grant = harness.grant("beyond", bytes + harness.context_bytes + 64 * MIB, 100);
    let share = harness.node.share_of(Grant { oversubscribe: true, ..grant });
    let said =
        harness.run(&harness.container(Mode::Preload, &share), &["beyond", &bytes.to_string()]);
    let [gpu, checked, wrong] = ["gpu", "checked", "wrong"].map(|field| number(&said, field));
    let (taken, total) = (mib(bytes as f64), mib(harness.gpu.total_bytes as f64));
    let figure = format!("{taken} on a GPU of {total}, {wrong:.0} of {checked:.0} words wrong");
    let by_gpu = judged(&format!("{figure} after the GPU wrote and copied them"), wrong == 0.0);
    vec![if gpu == 1.0 {
        by_gpu
    } else {
        format!("{figure} after the host wrote them: the GPU writes nothing")
    }]
}
