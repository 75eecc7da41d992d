//! The node's ResourceSlices are what the hardware is, whoever writes or deletes them.

mod stand_in;

use std::sync::Arc;

use serde_json::{Value, json};
use stand_in::{
    gpus::{Machine, uuid},
    node::Node,
};
use tessera_api::{
    Inventory,
    names::GpuUuid,
    slice::{DeviceOrder, MemoryRatio},
};
use tessera_driver::driver::{Driver, DriverDependencies, DriverSettings};
use tessera_gpu::{GpuLibrary, GpuMemory, GpuProcess, HealthWatch, LibraryError, RecoveryAction};

/// Names of the devices of all slices.
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
async fn gpus_are_published_fenced_and_owned_by_the_node() {
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

#[tokio::test]
async fn memory_is_published_as_often_as_the_setting_says_with_the_truth_beside_it() {
    let node = Node::with_gpus(1);
    let memory_ratio = MemoryRatio::from_percent(150).expect("a ratio");
    let settings = DriverSettings { memory_ratio, ..node.settings() };
    let _driver =
        node.start_with(settings, Arc::new(node.mounts.clone())).await.expect("it starts");
    let slices = node
        .api
        .wait_for("the slice", |api| Some(api.slices()).filter(|slices| !slices.is_empty()))
        .await;
    let device = &slices[0]["spec"]["devices"][0];
    assert_eq!(device["capacity"]["memory"]["value"], "24Gi");
    assert_eq!(device["attributes"]["physicalMemory"]["string"], "16Gi");
}

#[tokio::test]
async fn a_gpu_with_a_share_that_may_not_spill_is_published_with_what_it_has() {
    let node = Node::with_gpus(2);
    let memory_ratio = MemoryRatio::from_percent(150).expect("a ratio");
    let settings = DriverSettings { memory_ratio, ..node.settings() };
    let _driver =
        node.start_with(settings, Arc::new(node.mounts.clone())).await.expect("it starts");
    let published = async |what: &str, memory: [&str; 2]| {
        let is_so = |slices: &Vec<Value>| {
            let devices = slices.first().and_then(|slice| slice["spec"]["devices"].as_array());
            devices.is_some_and(|devices| {
                let of = |device: &Value| device["capacity"]["memory"]["value"].clone();
                let tells = |device: &Value| !device["attributes"]["physicalMemory"].is_null();
                devices.iter().map(of).eq(memory)
                    && devices.iter().all(|device| tells(device) == (of(device) == "24Gi"))
            })
        };
        node.api.wait_for(what, |api| Some(api.slices()).filter(is_so)).await;
    };
    published("both beyond what they have", ["24Gi", "24Gi"]).await;
    let kubelet = stand_in::kubelet::Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(1, 1, 0)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    published("the second with what it has", ["24Gi", "16Gi"]).await;
    kubelet.unprepare(claim).await.expect("unprepared");
    published("both again", ["24Gi", "24Gi"]).await;
}

#[tokio::test]
async fn what_the_kubelet_wipes_is_back_in_a_later_generation() {
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
async fn what_others_change_is_changed_back() {
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
        "two T4 have no link to tell of"
    );
}

#[tokio::test]
async fn a_slice_of_our_driver_that_somebody_else_wrote_is_removed() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let mut forged = node.api.slices()[0].clone();
    forged["metadata"] = json!({"name": "forged"});
    forged["spec"]["pool"]["generation"] = json!(9);
    forged["spec"]["devices"][0]["name"] = json!(uuid(7).device_name());
    node.api.put_slice(forged);
    let ours = |slices: &Vec<Value>| slices.len() == 1 && generation(&slices[0]) > 9;
    let slices = node.api.wait_for("ours alone", |api| Some(api.slices()).filter(ours)).await;
    assert_eq!(devices(&slices), names(0..1));
}

#[tokio::test]
async fn many_gpus_take_several_slices_of_one_generation() {
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

    // One of them deleted: both are of the next generation, so that no reader takes the old one for
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
    node.machine.lose(3);
    let one = |slices: &Vec<Value>| slices.len() == 1 && devices(slices).len() == 64;
    let slices = node.api.wait_for("one slice", |api| Some(api.slices()).filter(one)).await;
    assert_eq!(slices[0]["spec"]["pool"]["resourceSliceCount"], 1);
}

#[tokio::test]
async fn a_node_without_a_gpu_library_publishes_an_empty_slice_and_goes_on() {
    let node = Node::of(Machine::default());
    let mut driver = node.start().await;
    assert_eq!(devices(&node.api.slices()), Vec::<String>::new());
    let metrics = driver.metrics().render();
    assert!(metrics.contains("tessera_driver_hardware_known 0"), "{metrics}");
    let failed = tokio::time::timeout(std::time::Duration::from_millis(50), driver.failed()).await;
    assert!(failed.is_err(), "it goes on");
}

#[tokio::test]
async fn an_api_server_that_drops_the_fence_gets_no_devices() {
    let node = Node::with_gpus(1);
    node.api.drop_taints();
    let edges = node.settings();
    let driver =
        node.start_with(edges, std::sync::Arc::new(node.mounts.clone())).await.expect("it starts");
    let failed = |text: String| text.contains("tessera_driver_slice_failures_total 1");
    node.api
        .wait_for("the slice to be withdrawn", |api| {
            (api.slices().is_empty() && failed(driver.metrics().render())).then_some(())
        })
        .await;
}

#[tokio::test]
async fn the_order_of_devices_can_follow_their_use() {
    let node = Node::with_gpus(3);
    let settings = DriverSettings { device_order: DeviceOrder::FreeLast, ..node.settings() };
    let _driver = node
        .start_with(settings, std::sync::Arc::new(node.mounts.clone()))
        .await
        .expect("it starts");
    node.api.wait_for("a slice", |api| (!api.slices().is_empty()).then_some(())).await;
    let kubelet = stand_in::kubelet::Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(2, 1, 0)])).await.expect("prepared");
    node.api
        .wait_for("the GPU in use first", |api| {
            (devices(&api.slices()) == names([2, 0, 1])).then_some(())
        })
        .await;
}

/// A library with a defect.
struct Broken;

impl GpuLibrary for Broken {
    fn inventory(&self) -> Result<Inventory, LibraryError> {
        panic!("a defect");
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError> {
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
async fn a_driver_that_nobody_tells_of_the_gpus_any_more_ends_and_is_not_left_half_alive() {
    let node = Node::with_gpus(1);
    let mounts = Arc::new(node.mounts.clone());
    let edges = DriverDependencies { client: node.api.client(), gpus: Arc::new(Broken), mounts };
    let mut driver = Driver::start(node.settings(), edges).await.expect("it starts");
    let failure = driver.failed().await;
    assert!(failure.contains("watches the GPUs"), "{failure}");
    driver.stop().await;
}
