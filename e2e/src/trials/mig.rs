//! Trial of MIG devices: an instance is created for each claim beside one of an administrator, has
//! its capability devices in the container, and is destroyed after its pod. A larger device that
//! needs its memory slices waits until then. A pod of NVIDIA's device plugin gets one, too.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tessera_api::names::MIG_CLASS;

use super::dialect_pods::dialect_manifest;
use super::dialects;
use super::release::helm;
use super::test_bed::{TestBed, from_template, uid, wait_all, wait_deleted};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Index of the GPU on its node.
const GPU: &str = "0";

/// Directory of the fake kernel driver's files on a node (e2e/cluster/lib/node.sh).
const PROC_ROOT: &str = "driver.procRoot=/run/tessera/fake-mig/proc";

pub(super) async fn serves_mig_devices(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    let operations = test_bed.operations()?;
    let node = test_bed.node_with("a100", 4).await?;
    helm.upgrade(&["driver.mig=true", PROC_ROOT]).await?;
    let outcome = serve(&test_bed, operations, &node).await;
    // Later trials need the GPU, in every case.
    helm.upgrade(&[]).await?;
    let ended = end_mig_mode(&test_bed, operations, &node).await;
    outcome?;
    ended?;
    let is_whole = |devices: &[String]| devices.len() == 4 && !devices.iter().any(|n| is_mig(n));
    wait_devices(&test_bed, &node, is_whole).await?;
    test_bed.published_gpus().await?;
    Ok(Outcome::Passed(vec![]))
}

async fn end_mig_mode(
    test_bed: &TestBed,
    operations: &Operations,
    node: &str,
) -> anyhow::Result<()> {
    operations.run(&["gpu", node, "mig-destroy", GPU]).await?;
    // The directory of procfs was made on each node.
    for node in test_bed.published_gpus().await?.nodes() {
        operations.run(&["gpu", node, "mig", GPU, "off"]).await?;
    }
    // A new process reads the inventory at once.
    operations.run(&["kill", node, "driver"]).await?;
    Ok(())
}

async fn serve(test_bed: &TestBed, operations: &Operations, node: &str) -> anyhow::Result<()> {
    operations.run(&["gpu", node, "mig", GPU, "on"]).await?;
    // Profile 3g.40gb at memory slice 4.
    operations.run(&["gpu", node, "mig-create", GPU, "9", "4"]).await?;
    // A new process reads the inventory at once.
    operations.run(&["kill", node, "driver"]).await?;
    let is_ready = |devices: &[String]| {
        devices.iter().any(|name| is_mig(name)) && !devices.iter().any(|n| n.ends_with("-9-4"))
    };
    wait_devices(test_bed, node, is_ready).await?;

    let selector = "device.attributes['gpu.tessera.dev'].profile == '1g.10gb'";
    test_bed
        .create_template_with(
            "small",
            request(json!({
                "selectors": [{"cel": {"expression": selector}}],
            })),
        )
        .await?;
    let larger = json!({"capacity": {"requests": {"memory": "30Gi"}}});
    test_bed.create_template_with("large", request(larger)).await?;

    serve_pod_of_device_plugin(test_bed).await?;
    let small = test_bed.start_holder("small", "small").await?;
    check_device(test_bed, &small, "-mig-1g10gb-19-").await?;
    check_container(operations, node, &small).await?;

    test_bed.create(from_template("large", "large")).await?;
    test_bed.wait_unschedulable(&["large".to_owned()]).await?;
    // While the driver is away, the pod cannot end.
    operations.run(&["kill", node, "driver"]).await?;
    test_bed.delete_if_exists("small", &DeleteParams::default()).await?;
    wait_deleted(test_bed.pods(), "small").await?;
    let large = test_bed.wait_running("large").await?;
    check_device(test_bed, &large, "-mig-3g40gb-9-0").await?;
    test_bed.delete(&["large"]).await
}

/// A pod that asks for `nvidia.com/mig-1g.10gb` runs unchanged (e2e/cluster/values.yaml).
async fn serve_pod_of_device_plugin(test_bed: &TestBed) -> anyhow::Result<()> {
    dialects::select(test_bed, "nvidia").await?;
    let mut pod = dialect_manifest("nvidia", "plugin")?;
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/mig-1g.10gb": 1}});
    test_bed.create(pod).await?;
    let pod = test_bed.wait_running("plugin").await?;
    check_device(test_bed, &pod, "-mig-1g10gb-19-").await?;
    dialects::label(test_bed, Value::Null).await?;
    test_bed.delete(&["plugin"]).await
}

/// Returns the request for one MIG device with these fields.
fn request(fields: Value) -> Value {
    let mut exactly = fields;
    exactly["deviceClassName"] = json!(MIG_CLASS);
    json!({"requests": [{"name": "mig", "exactly": exactly}]})
}

/// Checks that the container has the capability devices of its instances, and no interceptor.
async fn check_container(operations: &Operations, node: &str, pod: &Pod) -> anyhow::Result<()> {
    // The systemd cgroup driver writes `_` for `-`.
    let uid = uid(pod).replace('-', "[-_]");
    let command = format!(
        "for p in /proc/[0-9]*; do
           if grep -q '{uid}' $p/cgroup && tr '\\0' ' ' <$p/cmdline | grep -q '^tessera-probe'; then
             ls $p/root/dev/nvidia-caps $p/root/dev
             exit
           fi
         done 2>/dev/null
         exit 1"
    );
    let listed = operations.run(&["exec", node, "sh", "-c", &command]).await?;
    let count = listed.lines().filter(|line| line.starts_with("nvidia-cap")).count();
    // Two devices, and their directory.
    anyhow::ensure!(count == 3 && !listed.contains("tessera"), "the container has {listed}");
    Ok(())
}

async fn check_device(test_bed: &TestBed, pod: &Pod, part: &str) -> anyhow::Result<()> {
    let devices = test_bed.gpus_of(std::slice::from_ref(pod)).await?;
    let name = pod.name_any();
    anyhow::ensure!(devices.iter().all(|device| device.contains(part)), "{name} has {devices:?}");
    Ok(())
}

fn is_mig(device: &str) -> bool {
    device.contains("-mig-")
}

/// Waits for the names of the devices of a node.
async fn wait_devices(
    test_bed: &TestBed,
    node: &str,
    is_expected: impl Fn(&[String]) -> bool,
) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    let check = |slices: &[ResourceSlice]| {
        let own = slices.iter().filter(|slice| {
            slice.spec.driver == DRIVER && slice.spec.node_name.as_deref() == Some(node)
        });
        let devices = own.flat_map(|slice| slice.spec.devices.iter().flatten());
        let names: Vec<String> = devices.map(|device| device.name.clone()).collect();
        if is_expected(&names) {
            return CheckResult::Done(());
        }
        CheckResult::Pending(format!("{names:?}"))
    };
    wait_all(slices, "the devices of the node", check).await
}
