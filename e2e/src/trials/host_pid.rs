//! What a ledger says that the host calls a process of a container is what the container's node
//! calls it.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use tessera_intercept_abi::{LedgerReport, ProcessReport};

use super::bench::Bench;
use crate::harness::TrialOutcome;
use crate::operations::Operations;
use crate::runner::Outcome;

/// A process asks once, and waits a fifth of a second (ADR 86). On a busy machine the driver may be
/// late: then the next pod is tried.
const TRIES: usize = 5;

/// From the start of the container until its process has its place in the ledger, and far longer
/// than it then waits for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Nothing tells when a ledger changes.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub(super) async fn told(bench: Bench) -> TrialOutcome {
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"})).await?;
    for name in (1..=TRIES).map(|number| format!("pod-{number}")) {
        bench.holder(&name, "share").await?;
        let pod = bench.holds(&name).await?;
        let process = process_of(&bench, &pod).await?;
        if let Some(host_pid) = process.host_pid {
            is_of(bench.hands()?, &pod, host_pid).await?;
            anyhow::ensure!(
                process.pid != host_pid,
                "the host is said to call it as the container does: {process:?}"
            );
            bench.delete(&[name]).await?;
            return Ok(Outcome::Held(vec![]));
        }
        println!("    {name} was told nothing: {process:?}");
        bench.delete(&[name]).await?;
    }
    anyhow::bail!("none of {TRIES} processes was told what the host calls it")
}

/// The process with that number on the pod's node is the pod's.
async fn is_of(hands: &Operations, pod: &Pod, host_pid: u32) -> anyhow::Result<()> {
    let uid = pod.uid().context("a pod has a UID")?;
    let look = format!("cat /proc/{host_pid}/cgroup && tr '\\0' ' ' </proc/{host_pid}/cmdline");
    let seen = hands.run(&["exec", node_of(pod)?, "sh", "-c", &look]).await;
    let seen = seen.with_context(|| format!("the ledger of pod {uid} names {host_pid}"))?;
    // systemd's driver of cgroups writes `_` for `-`.
    anyhow::ensure!(
        seen.replace('_', "-").contains(&uid) && seen.contains("tessera-probe hold"),
        "the ledger of pod {uid} names {host_pid}, which is {seen}"
    );
    Ok(())
}

/// The one process of the pod's ledger, once it was told what the host calls it or has given up
/// waiting.
async fn process_of(bench: &Bench, pod: &Pod) -> anyhow::Result<ProcessReport> {
    let hands = bench.hands()?;
    let claim = bench.claim_of(pod).await?.uid().context("a claim has a UID")?;
    let mut seen = Vec::new();
    let look = async {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        loop {
            ticks.tick().await;
            seen = LedgerReport::parse(&ledger(hands, node_of(pod)?, &claim).await?)?
                .processes()
                .collect();
            if matches!(seen[..], [process] if process.host_pid.is_some()) {
                return anyhow::Ok(());
            }
        }
    };
    // Whether it ended in time is in what was seen.
    if let Ok(Err(error)) = tokio::time::timeout(PATIENCE, look).await {
        return Err(error);
    }
    match seen[..] {
        [process] => Ok(process),
        _ => anyhow::bail!("the ledger of claim {claim} should have one process: {seen:?}"),
    }
}

/// A copy of the claim's ledger.
async fn ledger(hands: &Operations, node: &str, claim: &str) -> anyhow::Result<Vec<u8>> {
    let dump = format!("od -An -v -tx1 /run/tessera/ledgers/{claim}/*/ledger");
    let dump = hands.run(&["exec", node, "sh", "-c", &dump]).await?;
    Ok(dump
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<_, _>>()?)
}

fn node_of(pod: &Pod) -> anyhow::Result<&str> {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .context("a pod that runs has a node")
}
