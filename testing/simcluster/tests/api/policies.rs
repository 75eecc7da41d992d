use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tessera_simcluster::api::{ApiServer, Fault, Policies, User};

use crate::{allocation, claim, created, refusal, sim, sim_api, slice, typed};

const DRIVER: &str = "gpu.tessera.dev";
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

fn claims_as(api: &ApiServer, user: &User) -> Api<ResourceClaim> {
    Api::default_namespaced(api.client(user))
}

fn controller() -> User {
    User::service_account("tessera-system", "tessera-controller")
}

fn driver() -> User {
    User::service_account("tessera-system", "tessera-driver")
}

async fn write(
    claims: &Api<ResourceClaim>,
    allocation: Value,
) -> Result<ResourceClaim, kube::Error> {
    let patch = Patch::Merge(json!({"status": {"allocation": allocation}}));
    claims.patch_status("c", &PatchParams::default(), &patch).await
}

#[tokio::test]
async fn only_controller_allocates_tessera_devices() {
    let (api, client) = sim().await;
    api.set_policies(Policies::all());
    let admin: Api<ResourceClaim> = Api::default_namespaced(client);
    created(&admin, claim("c")).await;
    let scheduler = claims_as(&api, &User::named("system:kube-scheduler"));
    let (code, reason, message) = refusal(write(&scheduler, allocation(DRIVER, "node-a")).await);
    assert_eq!((code, reason.as_str()), (403, "Forbidden"));
    assert!(
        message.ends_with("only tessera-controller allocates devices of gpu.tessera.dev"),
        "{message}"
    );
    write(&scheduler, allocation("other.example", "node-a")).await.unwrap();
    write(&scheduler, Value::Null).await.unwrap();
    write(&claims_as(&api, &controller()), allocation(DRIVER, "node-a")).await.unwrap();
    let denied = refusal(write(&admin, Value::Null).await);
    assert!(denied.2.contains("may not end an allocation of gpu.tessera.dev"));
    write(&scheduler, Value::Null).await.unwrap();
}

#[tokio::test]
async fn no_claim_tolerates_managed_taint_by_key() {
    let (api, client) = sim().await;
    api.set_policies(Policies::all());
    let claims: Api<ResourceClaim> = Api::default_namespaced(client);
    let with = |toleration: Value| {
        let mut object = serde_json::to_value(claim("c")).unwrap();
        object["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] = json!([toleration]);
        typed::<ResourceClaim>(object)
    };
    let tolerating = with(json!({"key": "gpu.tessera.dev/managed", "operator": "Exists"}));
    assert!(
        refusal(claims.create(&PostParams::default(), &tolerating).await)
            .2
            .contains("tessera-fence")
    );
    // A toleration of every taint is for other drivers, and harmless, since the write is guarded.
    created(&claims, with(json!({"operator": "Exists"}))).await;
}

#[tokio::test]
async fn driver_writes_only_slices_of_its_node() {
    const OWN: &str = "000-gpu.tessera.dev-node-a";
    let (api, _client) = sim().await;
    api.set_policies(Policies::all());
    let slices_as = |user: &User| Api::<ResourceSlice>::all(api.client(user));
    let own = slices_as(&driver().on_node("node-a"));
    created(&own, slice(OWN, "node-a")).await;
    let (code, _, message) = refusal(
        own.create(&PostParams::default(), &slice("000-gpu.tessera.dev-node-b", "node-b")).await,
    );
    assert_eq!(code, 403);
    assert!(message.ends_with("only those of its own node"), "{message}");
    let unbound = slices_as(&driver());
    assert!(unbound.create(&PostParams::default(), &slice(OWN, "node-a")).await.is_err());
    let other_node = slices_as(&driver().on_node("node-b"));
    assert!(other_node.delete(OWN, &DeleteParams::default()).await.is_err());
    let kubelet = slices_as(&User::kubelet("node-a"));
    assert!(kubelet.create(&PostParams::default(), &slice(OWN, "node-a")).await.is_err());
    kubelet.delete(OWN, &DeleteParams::default()).await.unwrap();
}

#[tokio::test]
async fn finalizer_stays_while_claim_is_allocated() {
    let (api, client) = sim().await;
    api.set_policies(Policies::all());
    let claims: Api<ResourceClaim> = Api::default_namespaced(client);
    let mut object = claim("c");
    object.metadata.finalizers = Some(vec![FINALIZER.into()]);
    created(&claims, object).await;
    let controller = claims_as(&api, &controller());
    write(&controller, allocation(DRIVER, "node-a")).await.unwrap();
    let strip = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    assert!(
        refusal(claims.patch("c", &PatchParams::default(), &strip).await)
            .2
            .contains("tessera-finalizer")
    );
    write(&controller, Value::Null).await.unwrap();
    claims.patch("c", &PatchParams::default(), &strip).await.unwrap();
}

#[tokio::test]
async fn fault_hook_refuses_requests_and_drops_responses() {
    let (api, claims) = sim_api::<ResourceClaim>().await;
    let down = tessera_simcluster::api::ApiError::internal("etcdserver: leader changed");
    let lost = down.clone();
    api.set_fault_hook(Some(std::sync::Arc::new(move |request| match request.verb {
        "create" => Fault::DropResponse(lost.clone()),
        "delete" => Fault::Refuse(down.clone()),
        _ => Fault::None,
    })));
    assert_eq!(refusal(claims.create(&PostParams::default(), &claim("c")).await).0, 500);
    assert!(claims.get_opt("c").await.unwrap().is_some());
    assert_eq!(refusal(claims.delete("c", &DeleteParams::default()).await).0, 500);
    api.set_fault_hook(None);
    claims.delete("c", &DeleteParams::default()).await.unwrap();
}
