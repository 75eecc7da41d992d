//! A tenant tampers with its grants and ledgers, from inside its containers: it gets no more
//! memory, and nobody else notices.

use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{LogParams, PostParams};
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE, container_ids, phase};
use crate::harness::TrialOutcome;
use crate::inventory::GpuInventory;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

const MIB: u64 = 1 << 20;
/// Of every claim; all of them are on one GPU.
const GRANTED: u64 = 5 << 30;
/// What somebody holds while the ledger is tampered with.
const HELD: u64 = 64 * MIB;

/// Files made in the container are no grant.
pub(super) async fn forged(bench: Bench) -> TrialOutcome {
    let gpu = OneGpu::of(&bench).await?;
    gpu.claim("own").await?;
    let pod = pod("forger", "own", &["--tamper", "forge-grant", "fill"]);
    gpu.create(pod).await?;
    let said = gpu.said("forger", "filled").await?;
    said.tampered_unhindered()?;
    anyhow::ensure!(said.taken()? == GRANTED, "took {} of {GRANTED}", said.taken()?);
    gpu.clean_up().await
}

/// Neither are files of a volume, which a link in the image has the runtime mount where grants are:
/// beside the true one, and over it.
pub(super) async fn forged_by_image(bench: Bench) -> TrialOutcome {
    let gpu = OneGpu::of(&bench).await?;
    gpu.claim("own").await?;
    gpu.create(pod("holder", "own", &["hold", "--take", "64Mi"])).await?;
    gpu.said("holder", "holding").await?;
    let id = gpu.share_id("own").await?;
    for (name, directory) in [("beside", "forged".to_owned()), ("over", id)] {
        gpu.create(forging_volume(name, &directory)).await?;
        let filled = gpu.said(name, "filled").await?;
        let taken = filled.taken()?;
        anyhow::ensure!(
            taken + HELD <= GRANTED,
            "{name} the true grant: took {taken} of {GRANTED}"
        );
        // It did get there: what is beside a true grant takes nothing from it, what is over it
        // hides it.
        let expected = if name == "beside" { GRANTED - HELD } else { 0 };
        anyhow::ensure!(
            taken == expected,
            "{name} the true grant: took {taken}, expected {expected}"
        );
    }
    gpu.clean_up().await
}

/// A pod whose first container forges a share in a volume, and whose second has it mounted through
/// the image's link `/links/…`, deep enough to be mounted after the true ones.
fn forging_volume(name: &str, share: &str) -> Value {
    let mut pod = pod(name, "own", &["fill"]);
    let mut forger = pod["spec"]["containers"][0].clone();
    forger["name"] = "forger".into();
    forger["command"] = json!([
        "tessera-probe",
        "--tamper",
        "forge-grant",
        "--forge-into",
        "/work",
        "--forge-id",
        share,
        "nothing"
    ]);
    forger["volumeMounts"] = json!([{"name": "work", "mountPath": "/work"}]);
    pod["spec"]["initContainers"] = json!([forger]);
    pod["spec"]["volumes"] = json!([{"name": "work", "emptyDir": {}}]);
    let mount = |file: &str, read_only: bool| {
        json!({
            "name": "work", "subPath": format!("forged/{file}"), "readOnly": read_only,
            "mountPath": format!("/links/to/where/grants/are/{share}/{file}"),
        })
    };
    let main = &mut pod["spec"]["containers"][0];
    main["image"] = "tessera/links:e2e".into();
    main["volumeMounts"] = json!([mount("grant", true), mount("ledger", false)]);
    pod
}

/// Ledgers ruined in every way, while another pod of the same claim holds memory, and a neighbour
/// beside them on the GPU.
pub(super) async fn ledgers(bench: Bench) -> TrialOutcome {
    const WAYS: [&str; 6] = [
        "truncate-ledger",
        "zero-ledger",
        "reset-ledger",
        "grow-ledger",
        "scramble-ledger",
        "forge-grant",
    ];
    let gpu = OneGpu::of(&bench).await?;
    gpu.claim("neighbour").await?;
    gpu.create(pod("neighbour", "neighbour", &["hold", "--take", "64Mi"])).await?;
    gpu.said("neighbour", "holding").await?;
    let before = gpu.bench.pods().get("neighbour").await?;
    for way in WAYS {
        gpu.claim(way).await?;
        gpu.create(pod(&format!("{way}-holder"), way, &["hold", "--take", "64Mi"])).await?;
    }
    for way in WAYS {
        gpu.said(&format!("{way}-holder"), "holding").await?;
        gpu.create(pod(way, way, &["--tamper", way, "fill"])).await?;
    }
    for way in WAYS {
        // A ledger that is no ledger any more has no room for a context either.
        let said = gpu.said_one_of(way, &["filled", "error"]).await?;
        said.tampered_for_nothing()?;
        let taken = said.taken()?;
        anyhow::ensure!(taken + HELD <= GRANTED, "{way}: took {taken} beside {HELD} of {GRANTED}");
    }
    gpu.nothing_noticed(&before).await?;
    gpu.clean_up().await
}

/// The container's `/dev` full, and a ledger grown: the node has as much room as before.
pub(super) async fn exhausted(bench: Bench) -> TrialOutcome {
    let gpu = OneGpu::of(&bench).await?;
    for claim in ["neighbour", "own"] {
        gpu.claim(claim).await?;
    }
    gpu.create(pod("neighbour", "neighbour", &["hold", "--take", "64Mi"])).await?;
    gpu.said("neighbour", "holding").await?;
    let before = gpu.bench.pods().get("neighbour").await?;
    gpu.create(pod("filler", "own", &["--tamper", "fill-dev", "fill"])).await?;
    let said = gpu.said("filler", "filled").await?;
    // containerd gives it 64 MiB.
    let gained = said.tampered["gainedBytes"].as_u64().unwrap_or(u64::MAX);
    anyhow::ensure!(gained <= 64 * MIB, "{} was written to /dev", said.tampered);
    anyhow::ensure!(said.taken()? == GRANTED, "took {} of {GRANTED}", said.taken()?);
    gpu.nothing_noticed(&before).await?;
    gpu.clean_up().await
}

/// Who may make namespaces may mount, and makes grants: a limit. The runtime's own seccomp profile
/// closes it.
pub(super) async fn namespaces(bench: Bench) -> TrialOutcome {
    let gpu = OneGpu::of(&bench).await?;
    for (name, profile) in [("confined", "RuntimeDefault"), ("unconfined", "Unconfined")] {
        gpu.claim(name).await?;
        let mut pod = pod(name, name, &["--tamper", "forge-by-mounting", "fill"]);
        pod["spec"]["securityContext"] = json!({"seccompProfile": {"type": profile}});
        gpu.create(pod).await?;
        let said = gpu.said(name, "filled").await?;
        let (taken, refused) = (said.taken()?, &said.tampered["refusedWith"]);
        if profile == "RuntimeDefault" {
            anyhow::ensure!(
                refused.is_string() && taken == GRANTED,
                "{profile}: {refused}, took {taken}"
            );
        } else if refused.is_null() {
            anyhow::ensure!(
                taken > GRANTED,
                "{profile}: forged, and took {taken}: then this is no limit any more"
            );
        }
    }
    gpu.clean_up().await
}

/// All pods of a trial are on one GPU.
struct OneGpu {
    bench: Bench,
    node: String,
    device: String,
}

/// What a probe said.
struct Said {
    tampered: Value,
    line: Value,
}

impl Said {
    /// What it got; nothing where already its context was refused for want of memory.
    fn taken(&self) -> anyhow::Result<u64> {
        if self.line["event"] == "error" && self.line["name"] == "CUDA_ERROR_OUT_OF_MEMORY" {
            return Ok(0);
        }
        self.line["takenBytes"]
            .as_u64()
            .ok_or_else(|| anyhow::anyhow!("no takenBytes in {}", self.line))
    }

    fn tampered_unhindered(&self) -> anyhow::Result<()> {
        let done = self.tampered.is_object() && self.tampered["refusedWith"].is_null();
        anyhow::ensure!(done, "the attempt was not made: {}", self.tampered);
        Ok(())
    }

    /// It was tried, and no memory of the node came of it.
    fn tampered_for_nothing(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.tampered["gainedBytes"] == 0, "{}", self.tampered);
        Ok(())
    }
}

impl OneGpu {
    async fn of(bench: &Bench) -> anyhow::Result<Self> {
        let node = bench.node_with("a100", 1).await?;
        let inventory = GpuInventory::read(&bench.client).await?;
        let device =
            inventory.first_of(&node).ok_or_else(|| anyhow::anyhow!("{node} publishes nothing"))?;
        Ok(Self { bench: bench.clone(), device: device.to_owned(), node })
    }

    /// A claim of a share of the GPU.
    async fn claim(&self, name: &str) -> anyhow::Result<()> {
        let uuid = self.device.trim_start_matches("gpu-");
        let select = format!("device.attributes[\"gpu.tessera.dev\"].uuid.endsWith(\"{uuid}\")");
        let exactly = json!({
            "deviceClassName": "gpu.tessera.dev", "selectors": [{"cel": {"expression": select}}],
            "capacity": {"requests": {"memory": GRANTED.to_string(), "cores": "1"}},
        });
        let claim = json!({
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        });
        self.bench.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        Ok(())
    }

    async fn create(&self, pod: Value) -> anyhow::Result<()> {
        self.bench.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        Ok(())
    }

    /// The id of the only share of a claim, as it names the directory in containers.
    async fn share_id(&self, claim: &str) -> anyhow::Result<String> {
        let claim = serde_json::to_value(self.bench.claims().get(claim).await?)?;
        let result = &claim["status"]["allocation"]["devices"]["results"][0];
        let (uid, share) = (claim["metadata"]["uid"].as_str(), result["shareID"].as_str());
        let id = uid.zip(share).map(|(uid, share)| format!("{uid}-{share}"));
        id.ok_or_else(|| anyhow::anyhow!("the claim has no share: {result}"))
    }

    /// Waits for a line of that event in the output of a pod's main container.
    async fn said(&self, pod: &str, event: &str) -> anyhow::Result<Said> {
        self.said_one_of(pod, &[event]).await
    }

    /// As [`OneGpu::said`], for the first of several events.
    async fn said_one_of(&self, pod: &str, events: &[&str]) -> anyhow::Result<Said> {
        let began = |pod: Option<&Pod>| {
            let statuses = pod.iter().flat_map(|pod| pod.status.iter());
            let statuses = statuses.flat_map(|status| status.container_statuses.iter().flatten());
            let mut states = statuses.filter_map(|status| status.state.as_ref());
            match states.any(|state| state.running.is_some() || state.terminated.is_some()) {
                true => Verdict::Done(()),
                false => Verdict::NotYet(
                    pod.map_or_else(|| "no pod".to_owned(), |pod| json!(pod.status).to_string()),
                ),
            }
        };
        wait::until_one(self.bench.pods(), pod, &format!("pod {pod} to run"), PATIENCE, began)
            .await?;
        let parameters =
            LogParams { container: Some("probe".into()), follow: true, ..LogParams::default() };
        let mut seen = String::new();
        let read = async {
            let mut tampered = Value::Null;
            let mut lines = self.bench.pods().log_stream(pod, &parameters).await?.lines();
            while let Some(line) = lines.try_next().await? {
                seen.push_str(&line);
                let line: Value = serde_json::from_str(&line).unwrap_or_default();
                match line["event"].as_str() {
                    Some("tampered") => tampered = line,
                    Some(found) if events.contains(&found) => return Ok(Said { tampered, line }),
                    _ => {}
                }
            }
            anyhow::bail!("its output ended")
        };
        let outcome = tokio::time::timeout(PATIENCE, read).await;
        let outcome = outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("nothing more")));
        outcome.map_err(|error| {
            anyhow::anyhow!("no `{}` of {pod}: {error}; it said: {seen}", events.join("`, `"))
        })
    }

    /// The neighbour runs on, has its memory and no more, and whoever comes next gets its own.
    async fn nothing_noticed(&self, neighbour: &Pod) -> anyhow::Result<()> {
        let name = neighbour.name_any();
        self.claim("newcomer").await?;
        for (pod, of, expected) in
            [("cap", name.as_str(), GRANTED - HELD), ("newcomer", "newcomer", GRANTED)]
        {
            self.create(self::pod(pod, of, &["fill"])).await?;
            let taken = self.said(pod, "filled").await?.taken()?;
            anyhow::ensure!(
                taken == expected,
                "{pod} of claim {of} took {taken}, expected {expected}"
            );
        }
        let after = self.bench.pods().get(&name).await?;
        anyhow::ensure!(
            phase(&after) == "Running" && container_ids(&after) == container_ids(neighbour),
            "the neighbour noticed: {}",
            json!(after.status)
        );
        Ok(())
    }

    /// All pods go, and with them everything on the node.
    async fn clean_up(&self) -> TrialOutcome {
        let pods = self.bench.pods().list(&Default::default()).await?;
        self.bench.delete(&pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>()).await?;
        if let Some(hands) = &self.bench.operations {
            super::residue::gone(hands, &self.node).await?;
        }
        Ok(Outcome::Held(vec![]))
    }
}

fn pod(name: &str, claim: &str, arguments: &[&str]) -> Value {
    let mut pod = super::bench::holder(name, json!({"name": "gpu", "resourceClaimName": claim}));
    let command = std::iter::once("tessera-probe").chain(arguments.iter().copied());
    pod["spec"]["containers"][0]["command"] = command.collect();
    pod
}
