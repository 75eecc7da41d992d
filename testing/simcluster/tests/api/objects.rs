use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event as CoreEvent, Namespace, Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Resource, ResourceExt};
use serde_json::json;

use crate::{claim, config_map, created, pod, refusal, server, server_api, sim, sim_api, typed};

#[tokio::test]
async fn created_object_gets_uid_time_version_and_defaults() {
    let (_api, client) = server().await;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let made = created(&pods, pod("a")).await;
    assert_eq!(made.metadata.generation, Some(1));
    assert_eq!(made.metadata.uid.as_ref().map(String::len), Some(36));
    assert!(made.metadata.creation_timestamp.is_some());
    assert!(made.resource_version().unwrap().parse::<u64>().unwrap() > 1);
    let spec = made.spec.unwrap();
    assert_eq!(spec.scheduler_name.as_deref(), Some("default-scheduler"));
    assert_eq!(spec.tolerations.unwrap().len(), 2);
    assert_eq!(made.status.unwrap().phase.as_deref(), Some("Pending"));

    let claims: Api<ResourceClaim> = Api::default_namespaced(client);
    let made = created(&claims, claim("c")).await;
    let request = &made.spec.unwrap().devices.unwrap().requests.unwrap()[0];
    let exactly = request.exactly.as_ref().unwrap();
    assert_eq!((exactly.allocation_mode.as_deref(), exactly.count), (Some("ExactCount"), Some(1)));
}

#[tokio::test]
async fn generated_name_is_prefix_and_five_characters() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let mut map = config_map("");
    map.metadata.name = None;
    map.metadata.generate_name = Some("pod-gpu-".to_owned());
    let (one, two) =
        (created(&maps, map.clone()).await.name_any(), created(&maps, map).await.name_any());
    assert_ne!(one, two);
    assert!(one.starts_with("pod-gpu-") && one.len() == "pod-gpu-".len() + 5, "{one}");
}

#[tokio::test]
async fn conflict_and_not_found_match_kubernetes() {
    let (_api, claims) = server_api::<ResourceClaim>().await;
    created(&claims, claim("c")).await;
    let taken = refusal(claims.create(&PostParams::default(), &claim("c")).await);
    assert_eq!(
        taken,
        (409, "AlreadyExists".into(), "resourceclaims.resource.k8s.io \"c\" already exists".into())
    );
    let missing = refusal(claims.get("d").await);
    assert_eq!(
        missing,
        (404, "NotFound".into(), "resourceclaims.resource.k8s.io \"d\" not found".into())
    );
    assert!(claims.get_opt("d").await.unwrap().is_none());
}

#[tokio::test]
async fn objects_need_a_namespace_that_exists() {
    let (_api, client) = server().await;
    let maps: Api<ConfigMap> = Api::namespaced(client, "nowhere");
    let (code, reason, message) =
        refusal(maps.create(&PostParams::default(), &config_map("a")).await);
    assert_eq!(
        (code, reason.as_str(), message.as_str()),
        (404, "NotFound", "namespaces \"nowhere\" not found")
    );
}

#[tokio::test]
async fn stale_update_conflicts_and_changes_nothing() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let first = created(&maps, config_map("a")).await;
    let mut second = first.clone();
    second.data.as_mut().unwrap().insert("a".into(), "2".into());
    let second = maps.replace("a", &PostParams::default(), &second).await.unwrap();
    assert_ne!(first.resource_version(), second.resource_version());
    let (code, reason, message) = refusal(maps.replace("a", &PostParams::default(), &first).await);
    assert_eq!((code, reason.as_str()), (409, "Conflict"));
    assert_eq!(
        message,
        "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to the latest version and try again"
    );
    assert_eq!(maps.get("a").await.unwrap().data, second.data);
}

#[tokio::test]
async fn unchanged_update_keeps_resource_version() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let first = created(&maps, config_map("a")).await;
    let again = maps.replace("a", &PostParams::default(), &first).await.unwrap();
    assert_eq!(first.resource_version(), again.resource_version());
}

#[tokio::test]
async fn update_of_another_incarnation_conflicts() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let mut map = created(&maps, config_map("a")).await;
    map.metadata.uid = Some("6a2f41a3-c54c-4cf5-93f6-9a2f1d3e4b5c".into());
    map.metadata.resource_version = None;
    let (code, _, message) = refusal(maps.replace("a", &PostParams::default(), &map).await);
    assert_eq!(code, 409);
    assert!(message.contains("Precondition failed: UID in precondition"), "{message}");
}

#[tokio::test]
async fn lease_update_requires_resource_version() {
    let (_api, leases) = server_api::<Lease>().await;
    let lease: Lease = typed(json!({"metadata": {"name": "l"}, "spec": {"holderIdentity": "one"}}));
    let mut made = created(&leases, lease).await;
    made.metadata.resource_version = None;
    assert_eq!(refusal(leases.replace("l", &PostParams::default(), &made).await).0, 422);
}

#[tokio::test]
async fn lists_select_by_label_field_and_namespace() {
    let (_api, client) = server().await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let run = uuid::Uuid::new_v4().simple().to_string();
    let other = format!("other-{run}");
    created(&namespaces, typed(json!({"metadata": {"name": other}}))).await;
    let here: Api<Pod> = Api::default_namespaced(client.clone());
    let there: Api<Pod> = Api::namespaced(client.clone(), &other);
    let everywhere: Api<Pod> = Api::all(client);
    for (name, labels) in
        [("a", json!({"app": "x", "tier": "1"})), ("b", json!({"app": "y"})), ("c", json!({}))]
    {
        let mut pod = pod(name);
        pod.metadata.labels = typed(labels);
        pod.metadata.labels.get_or_insert_default().insert("run".into(), run.clone());
        if name == "b" {
            pod.spec.as_mut().unwrap().node_name = Some("node-a".into());
        }
        created(&here, pod.clone()).await;
    }
    let mut far = pod("a");
    far.metadata.labels = Some([("run".to_owned(), run.clone())].into());
    created(&there, far).await;
    let names = async |api: &Api<Pod>, params: ListParams| {
        let list = api.list(&params).await.unwrap();
        list.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>().join(" ")
    };
    let labels = |selector: &str| ListParams::default().labels(selector);
    let fields = |selector: &str| ListParams::default().fields(selector);
    assert_eq!(names(&here, ListParams::default()).await, "a b c");
    assert_eq!(names(&everywhere, labels(&format!("run={run}"))).await.len(), "a b c a".len());
    assert_eq!(names(&here, labels("app=x")).await, "a");
    assert_eq!(names(&here, labels("app!=x")).await, "b c");
    assert_eq!(names(&here, labels("app in (x, y),tier")).await, "a");
    assert_eq!(names(&here, labels("app notin (x)")).await, "b c");
    assert_eq!(names(&here, labels("!app")).await, "c");
    assert_eq!(
        names(&everywhere, fields(&format!("metadata.name=a,metadata.namespace={other}"))).await,
        "a"
    );
    assert_eq!(names(&here, fields("spec.nodeName=node-a")).await, "b");
    assert_eq!(names(&here, fields("spec.nodeName=")).await, "a c");
    assert_eq!(names(&here, fields("status.phase!=Pending")).await, "");
    let (code, _, message) = refusal(here.list(&fields("spec.color=red")).await);
    assert_eq!((code, message.as_str()), (400, "field label not supported: spec.color"));
}

#[tokio::test]
async fn pages_show_one_consistent_state() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    for name in ["a", "b", "c"] {
        created(&maps, config_map(name)).await;
    }
    let first = maps.list(&ListParams::default().limit(2)).await.unwrap();
    assert_eq!(first.metadata.remaining_item_count, Some(1));
    maps.delete("c", &Default::default()).await.unwrap();
    created(&maps, config_map("d")).await;
    let token = first.metadata.continue_.unwrap();
    let second = maps.list(&ListParams::default().limit(2).continue_token(&token)).await.unwrap();
    assert_eq!(second.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["c"]);
    assert_eq!(second.metadata.resource_version, first.metadata.resource_version);
}

#[tokio::test]
async fn page_after_compaction_expires() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    for name in ["a", "b"] {
        created(&maps, config_map(name)).await;
    }
    let first = maps.list(&ListParams::default().limit(1)).await.unwrap();
    created(&maps, config_map("c")).await;
    api.compact();
    let token = first.metadata.continue_.unwrap();
    let (code, reason, _) = refusal(maps.list(&ListParams::default().continue_token(&token)).await);
    assert_eq!((code, reason.as_str()), (410, "Expired"));
}

#[tokio::test]
async fn event_is_served_in_both_groups() {
    let (_api, client) = server().await;
    let modern: Api<Event> = Api::default_namespaced(client.clone());
    let core: Api<CoreEvent> = Api::default_namespaced(client);
    let event: Event = typed(json!({
        "metadata": {"name": "e"}, "eventTime": "2026-11-21T04:00:00.000000Z", "type": "Warning",
        "reason": "NoFit", "action": "Allocate", "note": "no GPU fits",
        "regarding": {"kind": "Pod", "name": "p", "namespace": "default"},
        "reportingController": "tessera", "reportingInstance": "tessera-0",
    }));
    created(&modern, event).await;
    let fields = ListParams::default().fields("involvedObject.name=p,type=Warning");
    let seen = core.list(&fields).await.unwrap().items.remove(0);
    assert_eq!(seen.message.as_deref(), Some("no GPU fits"));
    assert_eq!(seen.involved_object.name.as_deref(), Some("p"));
    assert_eq!(seen.reporting_component.as_deref(), Some("tessera"));
    let fields = ListParams::default().fields("regarding.name=p,reportingController=tessera");
    assert_eq!(modern.list(&fields).await.unwrap().items[0].note.as_deref(), Some("no GPU fits"));
    let note = Patch::Merge(json!({"note": "other"}));
    let (code, _, message) = refusal(modern.patch("e", &PatchParams::default(), &note).await);
    assert_eq!(code, 422);
    assert!(message.contains("message: Invalid value: \"other\": field is immutable"), "{message}");
    let series = Patch::Merge(
        json!({"series": {"count": 2, "lastObservedTime": "2026-11-21T04:00:01.000000Z"}}),
    );
    let patched = modern.patch("e", &PatchParams::default(), &series).await.unwrap();
    assert_eq!(patched.series.unwrap().count, 2);
}

#[tokio::test]
async fn unknown_fields_are_dropped_and_wrong_types_refused() {
    let (_api, client) = server().await;
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Node"));
    let nodes: Api<DynamicObject> = Api::all_with(client, &resource);
    let mut node = DynamicObject::new("n", &resource).data(json!({
        "spec": {"unschedulable": true, "colour": "red"},
        "status": {"capacity": {"cpu": 4}},
    }));
    let made = created(&nodes, node.clone()).await;
    assert_eq!(
        (made.data["spec"]["unschedulable"].as_bool(), made.data["spec"].get("colour")),
        (Some(true), None)
    );
    assert_eq!(made.data["status"]["capacity"], json!({"cpu": "4"}));
    node.metadata.name = Some("m".into());
    node.data = json!({"spec": {"unschedulable": "yes"}});
    let (code, _, message) = refusal(nodes.create(&PostParams::default(), &node).await);
    assert_eq!(code, 400);
    assert!(message.starts_with("Node in version \"v1\" cannot be handled as a Node"), "{message}");
}

#[tokio::test]
async fn discovery_names_every_kind() {
    let (_api, client) = server().await;
    assert_eq!(client.apiserver_version().await.unwrap().git_version, "v1.37.1");
    let discovery = kube::Discovery::new(client).run().await.unwrap();
    let claims =
        discovery.resolve_gvk(&GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim"));
    assert_eq!(claims.unwrap().0.plural, ResourceClaim::plural(&()));
    assert!(discovery.resolve_gvk(&GroupVersionKind::gvk("", "v1", "Node")).is_some());
    assert!(
        discovery.resolve_gvk(&GroupVersionKind::gvk("events.k8s.io", "v1", "Event")).is_some()
    );
}

#[tokio::test]
async fn unknown_token_is_unauthorized() {
    let (api, _client) = sim().await;
    let mut config = kube::Config::new(api.url().parse().unwrap());
    config.auth_info.token = Some("made-up".to_owned().into());
    let client = kube::Client::try_from(config).unwrap();
    assert_eq!(refusal(Api::<Node>::all(client).list(&ListParams::default()).await).0, 401);
}

#[tokio::test]
async fn node_keeps_status_from_its_registration() {
    let (_api, client) = server().await;
    let nodes: Api<Node> = Api::all(client);
    let node: Node =
        typed(json!({"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "8"}}}));
    assert_eq!(created(&nodes, node).await.status.unwrap().allocatable.unwrap()["cpu"].0, "8");
}

#[tokio::test]
async fn dry_run_checks_a_creation_and_stores_nothing() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let made = maps.create(&dry, &config_map("a")).await.unwrap();
    assert!(made.metadata.uid.is_some() && made.metadata.resource_version.is_none());
    assert!(maps.get_opt("a").await.unwrap().is_none());
    created(&maps, config_map("a")).await;
    assert_eq!(refusal(maps.create(&dry, &config_map("a")).await).0, 409);
    let replaced = maps.replace("a", &dry, &config_map("a")).await;
    assert_eq!(refusal(replaced).0, 400, "refused, and not stored");
}
