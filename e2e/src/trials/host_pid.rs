//! What a ledger calls a container's process is what its node calls it: the name under which NVML lists it.

use std::time::Duration;

use kube::ResourceExt;
use serde_json::json;
use tessera_intercept_abi::{LedgerReport, ProcessReport};

use super::bench::Bench;
use crate::harness::TrialOutcome;
use crate::operations::Operations;
use crate::runner::Outcome;

/// A process asks when it first needs its place in the ledger, moments after its container runs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Nothing tells when a ledger changes.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub(super) async fn told(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?;
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"})).await?;
    let pods = ["one", "other"];
    for pod in pods {
        bench.holder(pod, "share").await?;
    }
    for pod in pods {
        let pod = bench.holds(pod).await?;
        let (uid, claim) = (pod.uid().unwrap_or_default(), bench.claim_of(&pod).await?);
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        let process = process_of(hands, node, &claim.uid().unwrap_or_default()).await?;
        let host_pid = process.host_pid.unwrap_or_default();
        let look = format!("cat /proc/{host_pid}/cgroup; tr '\\0' ' ' </proc/{host_pid}/cmdline");
        let seen = hands.run(&["exec", node, "sh", "-c", &look]).await?;
        anyhow::ensure!(
            seen.contains(&uid) && seen.contains("tessera-probe hold"),
            "the ledger of pod {uid} names process {host_pid} of {node}, which is {seen}"
        );
        anyhow::ensure!(process.pid != host_pid, "the container's own name for it: {process:?}");
    }
    bench.delete(&pods.map(str::to_owned)).await?;
    Ok(Outcome::Held(vec![]))
}

/// The one process of the claim's ledger, once it knows what the host calls it.
async fn process_of(hands: &Operations, node: &str, claim: &str) -> anyhow::Result<ProcessReport> {
    let mut last = "nothing".to_owned();
    let look = async {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        loop {
            ticks.tick().await;
            let ledger = ledger(hands, node, claim).await?;
            let processes: Vec<_> = LedgerReport::parse(&ledger)?.processes().collect();
            match processes[..] {
                [process] if process.host_pid.is_some() => return Ok(process),
                _ => last = format!("{processes:?}"),
            }
        }
    };
    let looked = tokio::time::timeout(PATIENCE, look).await;
    looked.map_err(|_| anyhow::anyhow!("no host PID in the ledger of claim {claim} on {node}: {last}"))?
}

/// A copy of the claim's ledger.
async fn ledger(hands: &Operations, node: &str, claim: &str) -> anyhow::Result<Vec<u8>> {
    let dump = format!("od -An -v -tx1 /run/tessera/ledgers/{claim}/*/ledger");
    let dump = hands.run(&["exec", node, "sh", "-c", &dump]).await?;
    Ok(dump.split_whitespace().map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>()?)
}
