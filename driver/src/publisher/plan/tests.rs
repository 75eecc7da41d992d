use serde_json::json;

use super::*;

/// Returns a desired slice with these devices.
fn page(name: &str, devices: &[&str]) -> ResourceSlice {
    let device = |name: &&str| {
        json!({
            "name": name, "allowMultipleAllocations": true,
            "attributes": {"type": {"string": "gpu"}},
            "capacity": {"memory": {"value": "16Gi", "requestPolicy": {"default": "16Gi",
                         "validRange": {"min": "1Mi", "step": "1Mi"}}}},
            "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}],
        })
    };
    let devices: Vec<_> = devices.iter().map(device).collect();
    serde_json::from_value(json!({
        "metadata": {"name": name, "annotations": {"gpu.tessera.dev/topology": "{}"}},
        "spec": {"driver": "gpu.tessera.dev", "nodeName": "node-a", "devices": devices,
                 "pool": {"name": "node-a", "generation": 0, "resourceSliceCount": 0}},
    }))
    .expect("a slice")
}

/// Returns that slice as stored in the API server.
fn stored(name: &str, devices: &[&str], generation: i64, count: i64) -> ResourceSlice {
    let mut slice = page(name, devices);
    slice.metadata.resource_version = Some("7".to_owned());
    slice.spec.pool.generation = generation;
    slice.spec.pool.resource_slice_count = count;
    for device in slice.spec.devices.iter_mut().flatten() {
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added =
                Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).expect("a time"));
        }
    }
    slice
}

/// Returns changes as text: verb, slice, generation and number of slices.
fn short(changes: &[SliceChange]) -> Vec<String> {
    let pool = |slice: &ResourceSlice| {
        format!("{}/{}", slice.spec.pool.generation, slice.spec.pool.resource_slice_count)
    };
    let name = |slice: &ResourceSlice| slice.metadata.name.clone().unwrap_or_default();
    changes
        .iter()
        .map(|change| match change {
            SliceChange::Delete(slice) => format!("delete {}", name(slice)),
            SliceChange::Create(slice) => format!("create {}", pool(slice)),
            SliceChange::Patch { observed, wanted } => {
                format!("patch {} {}", name(observed), pool(wanted))
            }
        })
        .collect()
}

#[test]
fn current_slices_need_no_change() {
    let observed = vec![stored("s1", &["b"], 3, 2), stored("s0", &["a"], 3, 2)];
    assert!(plan(vec![page("s0", &["a"]), page("s1", &["b"])], observed, 3).is_empty());
}

#[test]
fn other_notation_of_quantity_is_no_change() {
    let mut observed = stored("s", &["a"], 1, 1);
    let devices = observed.spec.devices.as_mut().expect("devices");
    devices[0].capacity.as_mut().expect("capacity").get_mut("memory").expect("memory").value.0 =
        "16384Mi".into();
    assert!(plan(vec![page("s", &["a"])], vec![observed], 1).is_empty());
}

#[test]
fn deleted_slice_is_created_in_next_generation() {
    assert_eq!(short(&plan(vec![page("s", &["a"])], vec![], 0)), ["create 1/1"]);
    assert_eq!(short(&plan(vec![page("s", &["a"])], vec![], 4)), ["create 5/1"]);
}

#[test]
fn one_changed_slice_keeps_generation_and_taint_times() {
    let changes = plan(vec![page("s", &["a", "b"])], vec![stored("s", &["a"], 3, 1)], 3);
    assert_eq!(short(&changes), ["patch s 3/1"]);
    let [SliceChange::Patch { wanted, .. }] = &changes[..] else { panic!("{changes:?}") };
    let devices = wanted.spec.devices.as_ref().expect("devices");
    let times: Vec<_> = devices
        .iter()
        .map(|device| device.taints.as_ref().expect("taints")[0].time_added.is_some())
        .collect();
    assert_eq!(times, [true, false]);
}

#[test]
fn other_changes_give_all_slices_the_next_generation() {
    let pages = || vec![page("s0", &["a"]), page("s1", &["b"])];
    // One of two was deleted.
    assert_eq!(
        short(&plan(pages(), vec![stored("s0", &["a"], 3, 2)], 3)),
        ["patch s0 4/2", "create 4/2"]
    );
    // Both differ.
    let both = vec![stored("s0", &["x"], 3, 2), stored("s1", &["y"], 3, 2)];
    assert_eq!(short(&plan(pages(), both, 3)), ["patch s0 4/2", "patch s1 4/2"]);
    // One is obsolete.
    let more =
        vec![stored("s0", &["a"], 3, 2), stored("s1", &["b"], 3, 2), stored("s2", &["b"], 3, 2)];
    assert_eq!(short(&plan(pages(), more, 3)), ["delete s2", "patch s0 4/2", "patch s1 4/2"]);
    // A crash left them in different generations.
    let torn = vec![stored("s0", &["a"], 4, 2), stored("s1", &["b"], 3, 2)];
    assert_eq!(short(&plan(pages(), torn, 4)), ["patch s0 5/2", "patch s1 5/2"]);
}

#[test]
fn device_order_is_content() {
    assert_eq!(
        short(&plan(vec![page("s", &["b", "a"])], vec![stored("s", &["a", "b"], 1, 1)], 1)),
        ["patch s 1/1"]
    );
}

#[test]
fn node_without_gpus_has_one_empty_slice() {
    assert_eq!(
        short(&plan(vec![page("s", &[])], vec![stored("s", &["a"], 2, 1)], 2)),
        ["patch s 2/1"]
    );
    let mut empty = stored("s", &[], 2, 1);
    empty.spec.devices = None;
    assert!(plan(vec![page("s", &[])], vec![empty], 2).is_empty());
}

#[test]
fn changed_annotation_is_written_and_foreign_one_kept() {
    let mut observed = stored("s", &["a"], 1, 1);
    let annotations = observed.metadata.annotations.as_mut().expect("annotations");
    annotations.insert("foreign".into(), "kept".into());
    assert!(plan(vec![page("s", &["a"])], vec![observed.clone()], 1).is_empty());

    let annotations = observed.metadata.annotations.as_mut().expect("annotations");
    annotations.insert("gpu.tessera.dev/topology".into(), "other".into());
    let changes = plan(vec![page("s", &["a"])], vec![observed], 1);
    let [SliceChange::Patch { observed, wanted }] = &changes[..] else { panic!("{changes:?}") };
    let body = patch(observed, wanted);
    assert_eq!(
        body["metadata"]["annotations"],
        json!({"gpu.tessera.dev/topology": "{}", "gpu.tessera.dev/fence": null})
    );
    assert_eq!(body["metadata"]["resourceVersion"], "7");
}

#[test]
fn dropped_taint_is_detected() {
    let mut unfenced = stored("s", &["a"], 1, 1);
    unfenced.spec.devices.as_mut().expect("devices")[0].taints = None;
    assert!(!same_fence(&page("s", &["a"]), &unfenced));
    assert!(same_fence(&page("s", &["a"]), &stored("s", &["a"], 1, 1)));
}
