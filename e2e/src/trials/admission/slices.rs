//! A driver writes its own node's slices, and nobody else writes what they say.

use serde_json::{Value, json};

use super::desk::{
    ADMINISTRATOR, Ask, At, CONTROLLER, DRIVER, DRIVER_ELSEWHERE, DRIVER_WITHOUT_NODE, Desk,
    GARBAGE_COLLECTOR, KUBELET, NODE, OTHER, OURS, all,
};

const SLICES: &str = "resourceslices";
const NAME: &str = "policies-slice";
const SLICE: At<'_> = At(SLICES, NAME, "");
const OWN_NODE: &str = "of its own node";
const ONLY_DRIVER: &str = "only tessera-driver publishes";

fn slice(driver: &str, node: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": NAME, "annotations": {"gpu.tessera.dev/topology": "{}"}, "labels": {"a": "b"}},
        "spec": {"driver": driver, "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": []},
    })
}

pub(super) async fn check(desk: &Desk) -> anyhow::Result<()> {
    let ours = || Ask::Create(slice(OURS, NODE));
    for by in [ADMINISTRATOR, KUBELET, CONTROLLER] {
        let says = if by.to_string() == "root" { ONLY_DRIVER } else { "" };
        desk.refused(by, "a slice of ours", says, all(SLICES), ours()).await;
    }
    for by in [DRIVER_WITHOUT_NODE, DRIVER_ELSEWHERE] {
        desk.refused(by, "a slice of a node that is not its own", OWN_NODE, all(SLICES), ours())
            .await;
    }
    desk.refused(
        DRIVER,
        "a slice of another driver",
        OWN_NODE,
        all(SLICES),
        Ask::Create(slice(OTHER, NODE)),
    )
    .await;
    let mut foreign_pool = slice(OURS, NODE);
    foreign_pool["spec"]["pool"]["name"] = "elsewhere".into();
    desk.refused(
        DRIVER,
        "a slice of another pool",
        OWN_NODE,
        all(SLICES),
        Ask::Create(foreign_pool),
    )
    .await;
    let mut everywhere = slice(OURS, NODE);
    everywhere["spec"].as_object_mut().map(|spec| spec.remove("nodeName"));
    everywhere["spec"]["allNodes"] = true.into();
    desk.refused(DRIVER, "a slice of all nodes", OWN_NODE, all(SLICES), Ask::Create(everywhere))
        .await;
    desk.creatable(ADMINISTRATOR, "a slice of another driver", SLICES, slice(OTHER, NODE)).await;

    desk.allowed(DRIVER, "a slice of its own node", all(SLICES), ours()).await;
    changes(desk).await;
    deletions(desk).await;
    Ok(())
}

async fn changes(desk: &Desk) {
    let pool = |generation: u32| json!({"spec": {"pool": {"name": NODE, "generation": generation, "resourceSliceCount": 1}}});
    let edits = [
        ("what a slice says", pool(7)),
        (
            "what a slice says of links",
            json!({"metadata": {"annotations": {"gpu.tessera.dev/topology": "forged"}}}),
        ),
        ("that a slice says anything of links", json!({"metadata": {"annotations": null}})),
    ];
    for (what, edit) in edits {
        let what = format!("changing {what}");
        desk.refused(ADMINISTRATOR, &what, ONLY_DRIVER, SLICE, Ask::Merge(edit.clone())).await;
        desk.refused(DRIVER_ELSEWHERE, &what, OWN_NODE, SLICE, Ask::Merge(edit)).await;
    }
    desk.allowed(DRIVER, "changing its slice", SLICE, Ask::Merge(pool(2))).await;
    // What the cluster does to every object: owners that are gone, finalizers of deletions,
    // migration of stored versions.
    let housekeeping = json!({"metadata": {"ownerReferences": null, "finalizers": null}});
    for by in [GARBAGE_COLLECTOR, ADMINISTRATOR] {
        desk.allowed(by, "housekeeping", SLICE, Ask::Merge(housekeeping.clone())).await;
        desk.allowed(by, "writing it as it is", SLICE, Ask::Merge(json!({}))).await;
    }
}

/// The kubelet deletes a driver's slices at its start, and when the driver is gone.
async fn deletions(desk: &Desk) {
    let again = || Ask::Create(slice(OURS, NODE));
    desk.refused(DRIVER_ELSEWHERE, "deleting it", OWN_NODE, SLICE, Ask::Delete).await;
    let of_node = Ask::DeleteCollection(format!("spec.nodeName={NODE},spec.driver={OURS}"));
    desk.allowed(KUBELET, "deleting all of its node's", all(SLICES), of_node).await;
    for by in [GARBAGE_COLLECTOR, ADMINISTRATOR, DRIVER] {
        desk.allowed(DRIVER, "publishing it again", all(SLICES), again()).await;
        desk.allowed(by, "deleting it", SLICE, Ask::Delete).await;
    }
}
