use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use kube::api::{Api, DeleteParams};
use serde_json::json;

use crate::{cluster, create, gone, plain_pod, present, until};

const NAME: &str = "goes-away";

#[tokio::test]
async fn namespace_is_deleted_with_its_contents() {
    let (_cluster, client) = cluster().await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    create(&namespaces, json!({"metadata": {"name": NAME}})).await;
    fn inside<K>(client: &Client) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(client.clone(), NAME)
    }
    let maps: Api<ConfigMap> = inside(&client);
    let claims: Api<ResourceClaim> = inside(&client);
    let pods: Api<Pod> = inside(&client);
    create(&maps, json!({"metadata": {"name": "a"}})).await;
    let finalizers = json!(["resource.kubernetes.io/delete-protection"]);
    create(&claims, json!({"metadata": {"name": "c", "finalizers": finalizers}, "spec": {}})).await;
    let mut bound = plain_pod("p", "1");
    bound["spec"]["nodeName"] = "node-a".into();
    create(&pods, bound).await;
    namespaces.delete(NAME, &DeleteParams::default()).await.unwrap();
    // A bound pod waits for its kubelet, and all other objects for the pod.
    until(&pods, "p", present(|pod: &Pod| pod.metadata.deletion_timestamp.is_some())).await;
    assert!(maps.get_opt("a").await.unwrap().is_some());
    pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    until(&maps, "a", gone()).await;
    until(&claims, "c", gone()).await;
    until(&namespaces, NAME, gone()).await;
}
