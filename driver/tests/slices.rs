//! The node's ResourceSlices match the hardware, also if other clients change them.

mod fakes;

use std::sync::Arc;

use fakes::{
    api::Api,
    gpus::{FakeGpus, uuid},
    node::Node,
};
use serde_json::{Value, json};
use tessera_api::{
    Inventory,
    names::GpuUuid,
    slice::{CoresRatio, DeviceOrder, MemoryRatio},
};
use tessera_driver::{
    driver::{Driver, DriverDependencies, DriverSettings},
    run::run_until,
};
use tessera_gpu::{
    GpuLibrary, GpuMemory, GpuProcess, HealthWatch, LibraryError, ProcessUtilization,
    RecoveryAction,
};
use tokio_util::sync::CancellationToken;

/// Returns the names of the devices of all slices.
fn devices(slices: &[Value]) -> Vec<String> {
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
    devices.map(|device| device["name"].as_str().expect("a name").to_owned()).collect()
}

fn names(numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
    numbers.into_iter().map(|number| uuid(number).device_name().to_string()).collect()
}

fn generation(slice: &Value) -> i64 {
    slice["spec"]["pool"]["generation"].as_i64().expect("a number")
}

#[tokio::test]
async fn publishes_tainted_gpus_owned_by_node() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    let [slice] = &node.api.slices()[..] else { panic!("{:#?}", node.api.slices()) };
    assert_eq!(slice["spec"]["nodeName"], "node-a");
    assert_eq!(
        slice["spec"]["pool"],
        json!({"name": "node-a", "generation": 1, "resourceSliceCount": 1})
    );
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "uid-of-the-node");
    assert_eq!(slice["metadata"]["ownerReferences"][0]["controller"], true);
    for device in slice["spec"]["devices"].as_array().expect("devices") {
        assert_eq!(device["taints"][0]["key"], "gpu.tessera.dev/managed");
        assert_eq!(device["taints"][0]["effect"], "NoSchedule");
    }
}

/// Starts a driver with these settings, and returns the first device that it publishes.
async fn first_device(node: &Node, settings: DriverSettings) -> (Driver, Value) {
    let driver = node.start_as(settings).await;
    let slices = node
        .api
        .wait_for("the slice", |api| Some(api.slices()).filter(|slices| !slices.is_empty()))
        .await;
    (driver, slices[0]["spec"]["devices"][0].clone())
}

#[tokio::test]
async fn publishes_configured_and_physical_memory() {
    let node = Node::with_gpus(1);
    let memory_ratio = MemoryRatio::from_percent(150).expect("a ratio");
    let settings = DriverSettings { memory_ratio, ..node.settings() };
    let (_driver, device) = first_device(&node, settings).await;
    assert_eq!(device["capacity"]["memory"]["value"], "24Gi");
    assert_eq!(device["attributes"]["physicalMemory"]["string"], "16Gi");
}

#[tokio::test]
async fn publishes_configured_cores_of_which_a_request_gets_one_gpu() {
    let node = Node::with_gpus(1);
    let cores_ratio = CoresRatio::from_percent(200).expect("a ratio");
    let settings = DriverSettings { cores_ratio, ..node.settings() };
    let (_driver, device) = first_device(&node, settings).await;
    let cores = &device["capacity"]["cores"];
    assert_eq!(cores["value"], "200");
    assert_eq!(cores["requestPolicy"]["validRange"]["max"], "100");
}

#[tokio::test]
async fn gpu_with_fixed_share_is_published_at_100_percent() {
    let node = Node::with_gpus(2);
    let memory_ratio = MemoryRatio::from_percent(150).expect("a ratio");
    let settings = DriverSettings { memory_ratio, ..node.settings() };
    let _driver = node.start_as(settings).await;
    let published = async |what: &str, memory: [&str; 2]| {
        let is_so = |slices: &Vec<Value>| {
            let devices = slices.first().and_then(|slice| slice["spec"]["devices"].as_array());
            devices.is_some_and(|devices| {
                let of = |device: &Value| device["capacity"]["memory"]["value"].clone();
                let has_physical =
                    |device: &Value| !device["attributes"]["physicalMemory"].is_null();
                devices.iter().map(of).eq(memory)
                    && devices.iter().all(|device| has_physical(device) == (of(device) == "24Gi"))
            })
        };
        node.api.wait_for(what, |api| Some(api.slices()).filter(is_so)).await;
    };
    published("both oversubscribed", ["24Gi", "24Gi"]).await;
    let kubelet = fakes::kubelet::Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(1, 1, 0)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    published("the second at 100 percent", ["24Gi", "16Gi"]).await;
    kubelet.unprepare(claim).await.expect("unprepared");
    published("both again", ["24Gi", "24Gi"]).await;
}

#[tokio::test]
async fn deleted_slices_return_in_next_generation() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    node.api.wipe_slices();
    let slices = node
        .api
        .wait_for("the slice", |api| Some(api.slices()).filter(|slices| !slices.is_empty()))
        .await;
    assert_eq!(devices(&slices), names(0..2));
    assert_eq!(generation(&slices[0]), 2);
}

#[tokio::test]
async fn changed_slices_are_restored() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    let name = node.api.slices()[0]["metadata"]["name"].as_str().expect("a name").to_owned();
    node.api.edit_slice(&name, |slice| {
        slice["spec"]["devices"][0]["taints"] = Value::Null;
        slice["metadata"]["annotations"]["gpu.tessera.dev/topology"] = json!("nonsense");
        slice["metadata"]["annotations"]["foreign"] = json!("kept");
    });
    let slice = node
        .api
        .wait_for("the fence", |api| {
            Some(api.slices()[0].clone())
                .filter(|slice| !slice["spec"]["devices"][0]["taints"].is_null())
        })
        .await;
    assert_eq!(
        slice["metadata"]["annotations"],
        json!({"foreign": "kept"}),
        "two T4 have no links"
    );
}

#[tokio::test]
async fn unknown_slice_of_driver_is_deleted() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let mut forged = node.api.slices()[0].clone();
    forged["metadata"] = json!({"name": "forged"});
    forged["spec"]["pool"]["generation"] = json!(9);
    forged["spec"]["devices"][0]["name"] = json!(uuid(7).device_name());
    node.api.put_slice(forged);
    let own = |slices: &Vec<Value>| slices.len() == 1 && generation(&slices[0]) > 9;
    let slices =
        node.api.wait_for("only the own slice", |api| Some(api.slices()).filter(own)).await;
    assert_eq!(devices(&slices), names(0..1));
}

#[tokio::test]
async fn many_gpus_need_several_slices_of_one_generation() {
    let node = Node::with_gpus(70);
    let _driver = node.start().await;
    let complete = |slices: &Vec<Value>| slices.len() == 2;
    let slices = node.api.wait_for("two slices", |api| Some(api.slices()).filter(complete)).await;
    assert_eq!(devices(&slices), names(0..70));
    for slice in &slices {
        assert_eq!(
            slice["spec"]["pool"],
            json!({"name": "node-a", "generation": 1, "resourceSliceCount": 2})
        );
    }

    // After one is deleted, both get the next generation: readers must not take the old pool for
    // complete.
    node.api.delete_slice(slices[1]["metadata"]["name"].as_str().expect("a name"));
    let both = |slices: &Vec<Value>| {
        slices.len() == 2 && slices.iter().all(|slice| generation(slice) == 2)
    };
    let slices =
        node.api.wait_for("both in generation 2", |api| Some(api.slices()).filter(both)).await;
    assert_eq!(devices(&slices), names(0..70));
}

#[tokio::test]
async fn fewer_gpus_need_fewer_slices() {
    let node = Node::with_gpus(65);
    let _driver = node.start().await;
    node.api.wait_for("two slices", |api| (api.slices().len() == 2).then_some(())).await;
    node.gpus.lose(3);
    let one = |slices: &Vec<Value>| slices.len() == 1 && devices(slices).len() == 64;
    let slices = node.api.wait_for("one slice", |api| Some(api.slices()).filter(one)).await;
    assert_eq!(slices[0]["spec"]["pool"]["resourceSliceCount"], 1);
}

#[tokio::test]
async fn node_without_gpu_library_publishes_empty_slice() {
    let node = Node::with_library(FakeGpus::default());
    let mut driver = node.start().await;
    assert_eq!(devices(&node.api.slices()), Vec::<String>::new());
    let metrics = driver.metrics().render();
    assert!(metrics.contains("tessera_driver_nvml_up 0"), "{metrics}");
    let failed = tokio::time::timeout(std::time::Duration::from_millis(50), driver.failed()).await;
    assert!(failed.is_err(), "it continues");
}

#[tokio::test]
async fn api_server_that_drops_taints_gets_no_devices() {
    let node = Node::with_gpus(1);
    node.api.drop_taints();
    let edges = node.settings();
    let driver = node.start_as(edges).await;
    let failed = |text: String| text.contains("tessera_driver_slice_failures_total 1");
    node.api
        .wait_for("the slice to be deleted", |api| {
            (api.slices().is_empty() && failed(driver.metrics().render())).then_some(())
        })
        .await;
}

#[tokio::test]
async fn device_order_follows_usage() {
    let node = Node::with_gpus(3);
    let settings = DriverSettings { device_order: DeviceOrder::FreeLast, ..node.settings() };
    let _driver = node.start_as(settings).await;
    node.api.wait_for("a slice", |api| (!api.slices().is_empty()).then_some(())).await;
    let kubelet = fakes::kubelet::Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(2, 1, 0)])).await.expect("prepared");
    node.api
        .wait_for("the GPU in use first", |api| {
            (devices(&api.slices()) == names([2, 0, 1])).then_some(())
        })
        .await;
}

#[tokio::test]
async fn gpus_added_and_removed_later_need_no_restart() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    for count in [3, 1] {
        node.gpus.plug(count);
        let is_published = |api: &Api| devices(&api.slices()) == names(0..count);
        node.api.wait_for("the GPUs", |api| is_published(api).then_some(())).await;
    }
}

/// A GPU library that panics.
struct Broken;

impl GpuLibrary for Broken {
    fn inventory(&self) -> Result<Inventory, LibraryError> {
        panic!("a defect");
    }

    fn is_outdated(&self) -> bool {
        false
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn utilization(
        &self,
        gpu: &GpuUuid,
        _: u64,
    ) -> Result<Option<ProcessUtilization>, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn busy_percent(&self, gpu: &GpuUuid) -> Result<Option<u8>, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn recovery_action(&self, _: &GpuUuid) -> Result<Option<RecoveryAction>, LibraryError> {
        Ok(None)
    }

    fn watch(&self, _: &[GpuUuid]) -> Result<Box<dyn HealthWatch>, LibraryError> {
        Err(LibraryError::Lost { gpu: uuid(0) })
    }
}

#[tokio::test]
async fn panic_of_a_thread_ends_the_driver_with_its_reason() {
    let node = Node::with_gpus(1);
    let mounts = Arc::new(node.mounts.clone());
    let dependencies = DriverDependencies {
        client: node.api.client(),
        gpus: Arc::new(Broken),
        mig: Arc::new(node.gpus.clone()),
        mounts,
    };
    let driver = Driver::start(node.settings(), dependencies).await.expect("it starts");
    let error = run_until(driver, CancellationToken::new()).await.expect_err("it ends");
    assert_eq!(error.to_string(), "task gpus ended unexpectedly: it panicked: a defect");
}

#[tokio::test]
async fn tasks_that_end_with_the_token_are_no_failure() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    driver.stopping().cancel();
    let stop = CancellationToken::new();
    let running = tokio::spawn(run_until(driver, stop.clone()));
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert!(!running.is_finished());
    stop.cancel();
    running.await.expect("no panic").expect("an orderly stop");
}

#[tokio::test]
async fn orderly_stop_of_driver_is_no_failure() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let stop = CancellationToken::new();
    let running = tokio::spawn(run_until(driver, stop.clone()));
    stop.cancel();
    running.await.expect("no panic").expect("an orderly stop");
}
