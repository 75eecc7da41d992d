//! Sharing by MPS (ADR 90), where NVIDIA's control daemon is.

use std::fs;
use std::path::Path;

use tessera_intercept_abi::mps::{ACTIVE_THREAD_PERCENTAGE, DIR, PIPE_DIRECTORY};
use tessera_intercept_abi::{ComputePolicy, Grant};

use super::programs::MPS_CONTROL;
use super::{Harness, Kind, TIMEOUT, absent, judged, mib, number, part};
use crate::container::{self, Container, MIB, Mode, MpsDaemon, NodeShare, Running, ask_mps};

pub(super) const CLIENTS: Kind = Kind {
    rows: &[
        ("MPS: multiprocessors that a client of 25 % sees", "a quarter of the GPU's"),
        (
            "MPS: small kernels of two clients of 50 %, together",
            "1.5 times those by turns at least",
        ),
        ("MPS: filled to the client's own limit of memory, as it sees it", ""),
        ("MPS: in use on the GPU by the server and one client", ""),
    ],
    find: |harness| match &harness.programs.mps_control {
        Some(control) => clients(harness, control).into(),
        None => vec![absent(MPS_CONTROL); 4],
    },
};

pub(super) const NO_DAEMON: Kind =
    Kind {
        rows: &[("MPS: asked after a daemon that there is not", "an error")],
        find: |harness| {
            let control = harness.programs.mps_control.as_ref();
            vec![control.map_or_else(
                || absent(MPS_CONTROL),
                |control| query_without_daemon(harness, control),
            )]
        },
    };

/// A share by MPS.
fn share(harness: &Harness<'_>, id: &str, percent: u32) -> NodeShare {
    let grant = harness.grant(id, harness.quarter(), percent);
    harness.node.share_of(Grant { mps: true, policy: ComputePolicy::Fixed, ..grant })
}

/// A container that is a client of so many percent, as the driver makes it. Clients that a daemon
/// does not take may wait for ever.
fn client<'a>(
    harness: &'a Harness<'_>,
    daemon: &MpsDaemon<'_>,
    share: &NodeShare,
) -> Container<'a> {
    let percentage = share.grant.cores_percent.to_string();
    let memory = format!("0={}M", share.grant.memory_limit_bytes / MIB);
    let variables = [
        (PIPE_DIRECTORY, DIR),
        (ACTIVE_THREAD_PERCENTAGE, percentage.as_str()),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory.as_str()),
    ];
    let container = harness.container(Mode::Preload, share).with_shared_memory(&daemon.memory);
    container.with_mps(&daemon.pipes, &variables).with_timeout(TIMEOUT)
}

fn clients(harness: &Harness<'_>, control: &Path) -> [String; 4] {
    let by_turns = small(
        harness,
        [harness.node.container_without_library(), harness.node.container_without_library()],
    );
    let before = harness.used();
    let daemon = MpsDaemon::start(harness.node, control, &harness.gpu.uuid.to_string());
    let halves = ["mps-one", "mps-other"].map(|id| share(harness, id, 50));
    let together = small(harness, halves.each_ref().map(|share| client(harness, &daemon, share)));
    [
        processors(harness, &daemon),
        compared(together, by_turns),
        filled(harness, &daemon),
        with_server(harness, &daemon, before),
    ]
}

fn processors(harness: &Harness<'_>, daemon: &MpsDaemon<'_>) -> String {
    let all = number(&harness.bare(&["processors"]), "processors");
    let said =
        harness.run(&client(harness, daemon, &share(harness, "mps-25", 25)), &["processors"]);
    let seen = number(&said, "processors");
    judged(&format!("{seen:.0} of {all:.0}"), (seen - all / 4.0).abs() <= 2.0)
}

/// Kernels of one block each that two containers get done at once, for each millisecond.
fn small(harness: &Harness<'_>, both: [Container<'_>; 2]) -> f64 {
    let windows = harness.effort.windows;
    let mut both = both.map(|container| harness.start_kernels("small", &container, windows + 1));
    both.iter_mut().map(|running: &mut Running| part(running, windows)).sum()
}

fn compared(together: f64, by_turns: f64) -> String {
    let times = together / by_turns;
    judged(
        &format!("{together:.2} for each ms, by turns {by_turns:.2} ({times:.2} times)"),
        times >= 1.5,
    )
}

/// Fills a client to its limit: NVIDIA does not document if the limit contains contexts.
fn filled(harness: &Harness<'_>, daemon: &MpsDaemon<'_>) -> String {
    let share = share(harness, "mps-fill", 50);
    let said =
        client(harness, daemon, &share).start(&harness.program, &["fill"]).wait_for_field("taken");
    let [taken, used] = ["taken", "cudaUsed"].map(|field| mib(number(&said, field)));
    let limit = mib(share.grant.memory_limit_bytes as f64);
    format!("{taken} taken, {used} used of a limit of {limit}")
}

/// Beside what was in use before there was a daemon.
fn with_server(harness: &Harness<'_>, daemon: &MpsDaemon<'_>, before: f64) -> String {
    let windows = 1_000;
    let mut client =
        harness.start(&client(harness, daemon, &share(harness, "mps-served", 50)), windows);
    client.wait_for_field("gpu");
    mib(harness.used() - before)
}

/// Queries a daemon that does not run: the supervisor of daemons relies on the failure.
fn query_without_daemon(harness: &Harness<'_>, control: &Path) -> String {
    let pipes = harness.node.path().join("mps-none");
    fs::create_dir_all(&pipes).expect("made");
    let output = ask_mps(harness.node, control, &pipes, "get_default_active_thread_percentage")
        .expect("it runs");
    let code = output.status.code().map_or_else(|| "none".to_owned(), |code| code.to_string());
    let figure = format!("{code} is its exit code: `{}`", container::last_line(&output));
    judged(&figure, !output.status.success())
}
