//! Trial of PID translation: the host PID in a ledger is the process's PID on the container's node.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use tessera_intercept_abi::{LedgerReport, ProcessReport};

use super::test_bed::{A100, TestBed};
use crate::harness::TrialOutcome;
use crate::operations::Operations;
use crate::runner::Outcome;

/// A process requests its host PID once and waits 200 ms (ADR 86). On a loaded machine the driver
/// may be late; then the next pod is tried.
const TRIES: usize = 5;

/// Time limit from the start of the container until its process has a slot in the ledger.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between reads of the ledger; no watch reports changes.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

pub(super) async fn check_translation(test_bed: TestBed) -> TrialOutcome {
    test_bed.create_template("share", A100, json!({"memory": "1Gi", "cores": "1"})).await?;
    for name in (1..=TRIES).map(|number| format!("pod-{number}")) {
        let pod = test_bed.start_holder(&name, "share").await?;
        let process = process_of(&test_bed, &pod).await?;
        if let Some(host_pid) = process.host_pid {
            check_process(test_bed.operations()?, &pod, host_pid).await?;
            anyhow::ensure!(
                process.pid != host_pid,
                "host PID and container PID are equal: {process:?}"
            );
            test_bed.delete(&[name]).await?;
            return Ok(Outcome::Passed(vec![]));
        }
        println!("    {name} has no host PID: {process:?}");
        test_bed.delete(&[name]).await?;
    }
    anyhow::bail!("none of {TRIES} processes has a host PID")
}

/// Checks that the process with that PID on the pod's node belongs to the pod.
async fn check_process(operations: &Operations, pod: &Pod, host_pid: u32) -> anyhow::Result<()> {
    let uid = pod.uid().context("pod without a UID")?;
    let command = format!("cat /proc/{host_pid}/cgroup && tr '\\0' ' ' </proc/{host_pid}/cmdline");
    let seen = operations.run(&["exec", node_of(pod)?, "sh", "-c", &command]).await;
    let seen =
        seen.with_context(|| format!("cannot read process {host_pid} in the ledger of pod {uid}"))?;
    // The systemd cgroup driver writes `_` for `-`.
    anyhow::ensure!(
        seen.replace('_', "-").contains(&uid) && seen.contains("tessera-probe hold"),
        "the ledger of pod {uid} contains host PID {host_pid}, which is {seen}"
    );
    Ok(())
}

/// Returns the only process in the pod's ledger. Waits until it has its host PID or its wait for
/// that has timed out.
async fn process_of(test_bed: &TestBed, pod: &Pod) -> anyhow::Result<ProcessReport> {
    let operations = test_bed.operations()?;
    let claim = test_bed.claim_of(pod).await?.uid().context("claim without a UID")?;
    let mut seen = Vec::new();
    let check = async {
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        loop {
            ticks.tick().await;
            seen = LedgerReport::parse(&read_ledger(operations, node_of(pod)?, &claim).await?)?
                .processes()
                .collect();
            if matches!(seen[..], [process] if process.host_pid.is_some()) {
                return anyhow::Ok(());
            }
        }
    };
    // The result is checked below, whether the wait succeeded or timed out.
    if let Ok(Err(error)) = tokio::time::timeout(TIMEOUT, check).await {
        return Err(error);
    }
    match seen[..] {
        [process] => Ok(process),
        _ => anyhow::bail!("expected one process in the ledger of claim {claim}: {seen:?}"),
    }
}

/// Reads the claim's ledger from the node.
async fn read_ledger(operations: &Operations, node: &str, claim: &str) -> anyhow::Result<Vec<u8>> {
    let dump = format!("od -An -v -tx1 /run/tessera/ledgers/{claim}/*/ledger");
    let dump = operations.run(&["exec", node, "sh", "-c", &dump]).await?;
    Ok(dump
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<_, _>>()?)
}

fn node_of(pod: &Pod) -> anyhow::Result<&str> {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .context("running pod without a node")
}
