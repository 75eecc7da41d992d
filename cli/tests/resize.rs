//! `kubectl tessera resize` beside other writers of the same GpuResize.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;
mod live;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fixture::device;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{Patch, PatchParams};
use live::{Live, errors};
use serde_json::json;
use tessera_api::resize::GpuResize;
use tessera_simcluster::api::{Fault, RequestInfo};

/// Returns a cluster in which the claim `a` has 10 GiB of a GPU.
async fn cluster() -> Live {
    let live = Live::new().await;
    live.claim("a", "10Gi").await;
    let claims: Api<ResourceClaim> = Api::namespaced(live.cluster.client(), "team-a");
    let result = json!({
        "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": device("aa"),
        "consumedCapacity": {"memory": "10Gi", "cores": "0", "shares": "1"},
        "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
    });
    let status =
        Patch::Merge(json!({"status": {"allocation": {"devices": {"results": [result]}}}}));
    claims.patch_status("a", &PatchParams::default(), &status).await.unwrap();
    live
}

/// Has another client write the GpuResize before each of the first `times` writes of its spec.
fn overtake(live: &Live, times: usize) {
    let left = AtomicUsize::new(times);
    let hook = move |request: &RequestInfo| {
        let is_write = request.resource == "gpuresizes" && request.verb == "update";
        let take = |left: usize| left.checked_sub(1);
        let is_overtaken =
            is_write && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        if is_overtaken { Fault::ConflictingWrite } else { Fault::None }
    };
    live.cluster.api().set_fault_hook(Some(Arc::new(hook)));
}

#[tokio::test]
async fn a_status_written_meanwhile_is_no_obstacle() {
    let live = cluster().await;
    let resizes: Api<GpuResize> = Api::namespaced(live.cluster.client(), "team-a");
    let arguments =
        |memory| ["resize", "a", "--namespace", "team-a", "--no-wait", "--memory", memory];
    let first = live.call(&arguments("12Gi")).await;
    assert_eq!(first.status.code(), Some(0), "{}", errors(&first));
    overtake(&live, 2);
    let second = live.call(&arguments("14Gi")).await;
    assert_eq!(second.status.code(), Some(0), "{}", errors(&second));
    let spec = resizes.get("a").await.unwrap().spec;
    assert_eq!(json!(spec)["requests"][0]["memory"], "14Gi");
    overtake(&live, 100);
    let third = live.call(&arguments("16Gi")).await;
    assert_eq!(third.status.code(), Some(1));
    assert!(errors(&third).contains("was changed by another client"), "{}", errors(&third));
    live.cluster.stop().await;
}
