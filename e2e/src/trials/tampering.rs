//! Trials of a tenant that tampers with its grants and ledgers in its containers. It gets no more
//! memory, and no other pod is affected.

use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::LogParams;
use serde_json::{Value, json};

use super::test_bed::{TIMEOUT, TestBed, wait_one};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const MIB: u64 = 1 << 20;
/// Memory of each claim; all claims are on one GPU.
const GRANTED: u64 = 5 << 30;
/// Memory that a pod holds while the ledger is modified.
const HELD: u64 = 64 * MIB;

/// Checks that files created in the container are not accepted as a grant.
pub(super) async fn forge_grant(test_bed: TestBed) -> TrialOutcome {
    let gpu = OneGpu::new(&test_bed).await?;
    gpu.claim("own").await?;
    let pod = pod("forger", "own", &["--tamper", "forge-grant", "fill"]);
    gpu.create(pod).await?;
    let output = gpu.wait_output("forger", "filled").await?;
    output.check_tampered()?;
    anyhow::ensure!(
        output.allocated_bytes()? == GRANTED,
        "allocated {} of {GRANTED}",
        output.allocated_bytes()?
    );
    gpu.clean_up().await
}

/// Checks that files of a volume are not accepted as a grant. A symbolic link in the image makes
/// the runtime mount them in the grants' directory, beside the real grant and over it.
pub(super) async fn forge_grant_by_image(test_bed: TestBed) -> TrialOutcome {
    let gpu = OneGpu::new(&test_bed).await?;
    gpu.claim("own").await?;
    gpu.create(pod("holder", "own", &["hold", "--take", "64Mi"])).await?;
    gpu.wait_output("holder", "holding").await?;
    let id = gpu.share_id("own").await?;
    for (name, directory) in [("beside", "forged".to_owned()), ("over", id)] {
        gpu.create(forging_volume(name, &directory)).await?;
        let filled = gpu.wait_output(name, "filled").await?;
        let taken = filled.allocated_bytes()?;
        anyhow::ensure!(
            taken + HELD <= GRANTED,
            "mounted {name} the real grant: allocated {taken} of {GRANTED}"
        );
        // The mount succeeded: beside the real grant it has no effect, over it it hides the grant.
        let expected = if name == "beside" { GRANTED - HELD } else { 0 };
        anyhow::ensure!(
            taken == expected,
            "mounted {name} the real grant: allocated {taken}, expected {expected}"
        );
    }
    gpu.clean_up().await
}

/// Returns a pod whose init container forges a share in a volume. The main container mounts it
/// through the image's link `/links/…`, whose path is deep enough to be mounted after the real
/// grants.
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

/// Corrupts ledgers in several ways. Meanwhile another pod of the same claim holds memory, and a
/// pod of another claim uses the GPU.
pub(super) async fn corrupt_ledgers(test_bed: TestBed) -> TrialOutcome {
    const METHODS: [&str; 6] = [
        "truncate-ledger",
        "zero-ledger",
        "reset-ledger",
        "grow-ledger",
        "scramble-ledger",
        "forge-grant",
    ];
    let gpu = OneGpu::new(&test_bed).await?;
    gpu.claim("other").await?;
    gpu.create(pod("other", "other", &["hold", "--take", "64Mi"])).await?;
    gpu.wait_output("other", "holding").await?;
    let before = gpu.test_bed.pods().get("other").await?;
    for method in METHODS {
        gpu.claim(method).await?;
        gpu.create(pod(&format!("{method}-holder"), method, &["hold", "--take", "64Mi"])).await?;
    }
    for method in METHODS {
        gpu.wait_output(&format!("{method}-holder"), "holding").await?;
        gpu.create(pod(method, method, &["--tamper", method, "fill"])).await?;
    }
    for method in METHODS {
        // A corrupt ledger has no memory for a context either.
        let output = gpu.wait_output_of_any(method, &["filled", "error"]).await?;
        output.check_tampered_without_gain()?;
        let taken = output.allocated_bytes()?;
        anyhow::ensure!(
            taken + HELD <= GRANTED,
            "{method}: allocated {taken} beside {HELD} of {GRANTED}"
        );
    }
    gpu.check_undisturbed(&before).await?;
    gpu.clean_up().await
}

/// Fills the container's `/dev` and grows a ledger. Checks that the node has as much memory as
/// before.
pub(super) async fn fill_dev(test_bed: TestBed) -> TrialOutcome {
    let gpu = OneGpu::new(&test_bed).await?;
    for claim in ["other", "own"] {
        gpu.claim(claim).await?;
    }
    gpu.create(pod("other", "other", &["hold", "--take", "64Mi"])).await?;
    gpu.wait_output("other", "holding").await?;
    let before = gpu.test_bed.pods().get("other").await?;
    gpu.create(pod("filler", "own", &["--tamper", "fill-dev", "fill"])).await?;
    let output = gpu.wait_output("filler", "filled").await?;
    // containerd limits `/dev` to 64 MiB.
    let gained = output.tampered["gainedBytes"].as_u64().unwrap_or(u64::MAX);
    anyhow::ensure!(gained <= 64 * MIB, "{} was written to /dev", output.tampered);
    anyhow::ensure!(
        output.allocated_bytes()? == GRANTED,
        "allocated {} of {GRANTED}",
        output.allocated_bytes()?
    );
    gpu.check_undisturbed(&before).await?;
    gpu.clean_up().await
}

/// A container that may create namespaces may mount, and so forge grants: a known limitation. The
/// runtime's default seccomp profile prevents it.
pub(super) async fn forge_in_user_namespace(test_bed: TestBed) -> TrialOutcome {
    let gpu = OneGpu::new(&test_bed).await?;
    for (name, profile) in [("confined", "RuntimeDefault"), ("unconfined", "Unconfined")] {
        gpu.claim(name).await?;
        let mut pod = pod(name, name, &["--tamper", "forge-by-mounting", "fill"]);
        pod["spec"]["securityContext"] = json!({"seccompProfile": {"type": profile}});
        gpu.create(pod).await?;
        let output = gpu.wait_output(name, "filled").await?;
        let (taken, refused) = (output.allocated_bytes()?, &output.tampered["refusedWith"]);
        if profile == "RuntimeDefault" {
            anyhow::ensure!(
                refused.is_string() && taken == GRANTED,
                "{profile}: {refused}, allocated {taken}"
            );
        } else if refused.is_null() {
            anyhow::ensure!(
                taken > GRANTED,
                "{profile}: forged a grant and allocated {taken}; the documented limitation no longer exists"
            );
        }
    }
    gpu.clean_up().await
}

/// Pods and claims of a trial, all on one GPU.
struct OneGpu {
    test_bed: TestBed,
    node: String,
    device: String,
}

/// Output of a probe.
struct ProbeOutput {
    tampered: Value,
    line: Value,
}

impl ProbeOutput {
    /// Returns the allocated bytes; 0 if the context itself exceeded the share's memory.
    fn allocated_bytes(&self) -> anyhow::Result<u64> {
        if self.line["event"] == "error" && self.line["name"] == "CUDA_ERROR_OUT_OF_MEMORY" {
            return Ok(0);
        }
        self.line["takenBytes"]
            .as_u64()
            .ok_or_else(|| anyhow::anyhow!("no takenBytes in {}", self.line))
    }

    fn check_tampered(&self) -> anyhow::Result<()> {
        let done = self.tampered.is_object() && self.tampered["refusedWith"].is_null();
        anyhow::ensure!(done, "the tampering did not succeed: {}", self.tampered);
        Ok(())
    }

    /// Checks that the attempt was made, and that it allocated no memory of the node.
    fn check_tampered_without_gain(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.tampered["gainedBytes"] == 0, "{}", self.tampered);
        Ok(())
    }
}

impl OneGpu {
    async fn new(test_bed: &TestBed) -> anyhow::Result<Self> {
        let node = test_bed.node_with("a100", 1).await?;
        let inventory = test_bed.published_gpus().await?;
        let device =
            inventory.first_of(&node).ok_or_else(|| anyhow::anyhow!("{node} publishes nothing"))?;
        Ok(Self { test_bed: test_bed.clone(), device: device.to_owned(), node })
    }

    /// Creates a claim of a share of the GPU.
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
        self.test_bed.create_claim(claim).await.map(drop)
    }

    async fn create(&self, pod: Value) -> anyhow::Result<()> {
        self.test_bed.create(pod).await.map(drop)
    }

    /// Returns the ID of the only share of a claim, which names its directory in containers.
    async fn share_id(&self, claim: &str) -> anyhow::Result<String> {
        let claim = serde_json::to_value(self.test_bed.claims().get(claim).await?)?;
        let result = &claim["status"]["allocation"]["devices"]["results"][0];
        let (uid, share) = (claim["metadata"]["uid"].as_str(), result["shareID"].as_str());
        let id = uid.zip(share).map(|(uid, share)| format!("{uid}-{share}"));
        id.ok_or_else(|| anyhow::anyhow!("the claim has no share: {result}"))
    }

    /// Waits for a line of that event in the output of a pod's main container.
    async fn wait_output(&self, pod: &str, event: &str) -> anyhow::Result<ProbeOutput> {
        self.wait_output_of_any(pod, &[event]).await
    }

    /// Waits as [`OneGpu::wait_output`] does, for the first of several events.
    async fn wait_output_of_any(&self, pod: &str, events: &[&str]) -> anyhow::Result<ProbeOutput> {
        let began = |pod: Option<&Pod>| {
            let statuses = pod.iter().flat_map(|pod| pod.status.iter());
            let statuses = statuses.flat_map(|status| status.container_statuses.iter().flatten());
            let mut states = statuses.filter_map(|status| status.state.as_ref());
            CheckResult::done_if(
                states.any(|state| state.running.is_some() || state.terminated.is_some()),
                || pod.map_or_else(|| "no pod".to_owned(), |pod| json!(pod.status).to_string()),
            )
        };
        wait_one(self.test_bed.pods(), pod, &format!("pod {pod} to run"), began).await?;
        let parameters =
            LogParams { container: Some("probe".into()), follow: true, ..LogParams::default() };
        let mut seen = String::new();
        let read = async {
            let mut tampered = Value::Null;
            let mut lines = self.test_bed.pods().log_stream(pod, &parameters).await?.lines();
            while let Some(line) = lines.try_next().await? {
                seen.push_str(&line);
                let line: Value = serde_json::from_str(&line).unwrap_or_default();
                match line["event"].as_str() {
                    Some("tampered") => tampered = line,
                    Some(found) if events.contains(&found) => {
                        return Ok(ProbeOutput { tampered, line });
                    }
                    _ => {}
                }
            }
            anyhow::bail!("the output ended")
        };
        let outcome = tokio::time::timeout(TIMEOUT, read).await;
        let outcome = outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("timed out")));
        outcome.map_err(|error| {
            anyhow::anyhow!("no `{}` of {pod}: {error}; output: {seen}", events.join("`, `"))
        })
    }

    /// Checks that the other pod still runs with its memory limit, and that the next pod gets its
    /// own memory.
    async fn check_undisturbed(&self, other: &Pod) -> anyhow::Result<()> {
        let name = other.name_any();
        self.claim("next").await?;
        for (pod, of, expected) in
            [("cap", name.as_str(), GRANTED - HELD), ("next", "next", GRANTED)]
        {
            self.create(self::pod(pod, of, &["fill"])).await?;
            let taken = self.wait_output(pod, "filled").await?.allocated_bytes()?;
            anyhow::ensure!(
                taken == expected,
                "{pod} of claim {of} allocated {taken}, expected {expected}"
            );
        }
        self.test_bed.check_undisturbed(other).await
    }

    /// Deletes all pods, and checks that the node has none of their files.
    async fn clean_up(&self) -> TrialOutcome {
        let pods = self.test_bed.pods().list(&Default::default()).await?;
        self.test_bed.delete(&pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>()).await?;
        if let Some(operations) = &self.test_bed.operations {
            super::residue::wait_removed(operations, &self.node).await?;
        }
        Ok(Outcome::Passed(vec![]))
    }
}

fn pod(name: &str, claim: &str, arguments: &[&str]) -> Value {
    let mut pod = super::test_bed::holder(name, json!({"name": "gpu", "resourceClaimName": claim}));
    let command = std::iter::once("tessera-probe").chain(arguments.iter().copied());
    pod["spec"]["containers"][0]["command"] = command.collect();
    pod
}
