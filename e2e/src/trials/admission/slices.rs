//! Policy `tessera-slices`: only the driver of a node writes the content of its slices.

use serde_json::{Value, json};

use super::harness::{
    ADMINISTRATOR, Action, AdmissionHarness, CONTROLLER, DRIVER, DRIVER_ELSEWHERE,
    DRIVER_WITHOUT_NODE, GARBAGE_COLLECTOR, KUBELET, NODE, OTHER_DRIVER, OWN_DRIVER, Target, all,
};

const SLICES: &str = "resourceslices";
const NAME: &str = "000-gpu.tessera.dev-policies-node";
const SLICE: Target<'_> = Target(SLICES, NAME, "");
const OWN_NODE: &str = "of its own node";
const ONLY_DRIVER: &str = "only tessera-driver publishes";

fn slice(driver: &str, node: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": NAME, "annotations": {"gpu.tessera.dev/topology": "{}"}, "labels": {"a": "b"}},
        "spec": {"driver": driver, "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": []},
    })
}

pub(super) async fn check(harness: &AdmissionHarness) -> anyhow::Result<()> {
    let own = || Action::Create(slice(OWN_DRIVER, NODE));
    for by in [ADMINISTRATOR, KUBELET, CONTROLLER] {
        let message = if by.to_string() == "root" { ONLY_DRIVER } else { "" };
        harness.expect_denied(by, "a slice of the driver", message, all(SLICES), own()).await;
    }
    for by in [DRIVER_WITHOUT_NODE, DRIVER_ELSEWHERE] {
        harness
            .expect_denied(
                by,
                "a slice of a node that is not its own",
                OWN_NODE,
                all(SLICES),
                own(),
            )
            .await;
    }
    harness
        .expect_denied(
            DRIVER,
            "a slice of another driver",
            OWN_NODE,
            all(SLICES),
            Action::Create(slice(OTHER_DRIVER, NODE)),
        )
        .await;
    let mut foreign_pool = slice(OWN_DRIVER, NODE);
    foreign_pool["spec"]["pool"]["name"] = "elsewhere".into();
    harness
        .expect_denied(
            DRIVER,
            "a slice of another pool",
            OWN_NODE,
            all(SLICES),
            Action::Create(foreign_pool),
        )
        .await;
    let mut everywhere = slice(OWN_DRIVER, NODE);
    everywhere["spec"].as_object_mut().map(|spec| spec.remove("nodeName"));
    everywhere["spec"]["allNodes"] = true.into();
    harness
        .expect_denied(
            DRIVER,
            "a slice of all nodes",
            OWN_NODE,
            all(SLICES),
            Action::Create(everywhere),
        )
        .await;
    harness
        .expect_creatable(
            ADMINISTRATOR,
            "a slice of another driver",
            SLICES,
            slice(OTHER_DRIVER, NODE),
        )
        .await;

    let mut renamed = slice(OWN_DRIVER, NODE);
    renamed["metadata"]["name"] = "policies-slice".into();
    let mut one_of_many = slice(OWN_DRIVER, NODE);
    one_of_many["spec"]["pool"]["resourceSliceCount"] = 9.into();
    for (what, slice) in [("a slice of another name", renamed), ("one of many slices", one_of_many)]
    {
        let create = Action::Create(slice);
        harness.expect_denied(DRIVER, what, "at most 8 slices", all(SLICES), create).await;
    }
    harness.expect_allowed(DRIVER, "a slice of its own node", all(SLICES), own()).await;
    changes(harness).await;
    deletions(harness).await;
    Ok(())
}

async fn changes(harness: &AdmissionHarness) {
    let pool = |generation: u32| json!({"spec": {"pool": {"name": NODE, "generation": generation, "resourceSliceCount": 1}}});
    let edits = [
        ("the content of a slice", pool(7)),
        (
            "the links in a slice",
            json!({"metadata": {"annotations": {"gpu.tessera.dev/topology": "forged"}}}),
        ),
        ("a slice by removing its links", json!({"metadata": {"annotations": null}})),
    ];
    for (what, edit) in edits {
        let what = format!("changing {what}");
        harness
            .expect_denied(ADMINISTRATOR, &what, ONLY_DRIVER, SLICE, Action::Merge(edit.clone()))
            .await;
        harness.expect_denied(DRIVER_ELSEWHERE, &what, OWN_NODE, SLICE, Action::Merge(edit)).await;
    }
    harness.expect_allowed(DRIVER, "changing its slice", SLICE, Action::Merge(pool(2))).await;
    // Changes that the cluster makes to any object: removal of owners and finalizers, storage
    // version migration.
    let housekeeping = json!({"metadata": {"ownerReferences": null, "finalizers": null}});
    for by in [GARBAGE_COLLECTOR, ADMINISTRATOR] {
        harness
            .expect_allowed(by, "housekeeping", SLICE, Action::Merge(housekeeping.clone()))
            .await;
        harness
            .expect_allowed(by, "writing it without a change", SLICE, Action::Merge(json!({})))
            .await;
    }
}

/// The kubelet deletes a driver's slices at its start and after the driver has exited.
async fn deletions(harness: &AdmissionHarness) {
    let again = || Action::Create(slice(OWN_DRIVER, NODE));
    harness.expect_denied(DRIVER_ELSEWHERE, "deleting it", OWN_NODE, SLICE, Action::Delete).await;
    let of_node =
        Action::DeleteCollection(format!("spec.nodeName={NODE},spec.driver={OWN_DRIVER}"));
    harness.expect_allowed(KUBELET, "deleting all of its node's", all(SLICES), of_node).await;
    for by in [GARBAGE_COLLECTOR, ADMINISTRATOR, DRIVER] {
        harness.expect_allowed(DRIVER, "publishing it again", all(SLICES), again()).await;
        harness.expect_allowed(by, "deleting it", SLICE, Action::Delete).await;
    }
}
