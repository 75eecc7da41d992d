use std::collections::BTreeSet;
use std::time::Duration;

use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;

use crate::{config_map, created, pod, server_api, sim, sim_api};

/// Longer than any step here takes on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Returns a watch event in short form.
fn short<K: ResourceExt>(event: WatchEvent<K>) -> String {
    match event {
        WatchEvent::Added(object) => format!("+{}", object.name_any()),
        WatchEvent::Modified(object) => format!("~{}", object.name_any()),
        WatchEvent::Deleted(object) => format!("-{}", object.name_any()),
        WatchEvent::Bookmark(bookmark)
            if bookmark.metadata.annotations.contains_key("k8s.io/initial-events-end") =>
        {
            "end".to_owned()
        }
        WatchEvent::Bookmark(_) => "bookmark".to_owned(),
        WatchEvent::Error(status) => format!("!{} {}", status.code, status.reason),
    }
}

async fn next<K: ResourceExt>(
    stream: &mut (impl Stream<Item = kube::Result<WatchEvent<K>>> + Unpin),
) -> String {
    let event = tokio::time::timeout(TIMEOUT, stream.next()).await;
    event.expect("no watch event").map_or("closed".to_owned(), |event| short(event.unwrap()))
}

#[tokio::test]
async fn watch_resumes_exactly_after_the_list() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let listed = maps.list(&ListParams::default()).await.unwrap();
    created(&maps, config_map("b")).await;
    let version = listed.metadata.resource_version.unwrap();
    let mut watch = maps.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    created(&maps, config_map("c")).await;
    maps.patch("a", &PatchParams::default(), &Patch::Merge(json!({"data": {"a": "2"}})))
        .await
        .unwrap();
    maps.delete("b", &DeleteParams::default()).await.unwrap();
    for expected in ["+b", "+c", "~a", "-b"] {
        assert_eq!(next(&mut watch).await, expected);
    }
}

#[tokio::test]
async fn watch_from_zero_begins_with_existing_objects() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let mut watch = maps.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    assert_eq!(next(&mut watch).await, "+a");
}

#[tokio::test]
async fn initial_events_end_with_annotated_bookmark() {
    let (_api, pods) = server_api::<Pod>().await;
    created(&pods, pod("a")).await;
    let params = WatchParams::default().initial_events();
    let mut watch = pods.watch(&params, "0").await.unwrap().boxed();
    assert_eq!((next(&mut watch).await, next(&mut watch).await), ("+a".into(), "end".into()));
}

#[tokio::test]
async fn objects_enter_and_leave_a_selector() {
    let (_api, pods) = server_api::<Pod>().await;
    created(&pods, pod("a")).await;
    let params = WatchParams::default().fields("status.phase=Running");
    let version =
        pods.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut watch = pods.watch(&params, &version).await.unwrap().boxed();
    for phase in ["Running", "Running", "Failed"] {
        let patch =
            json!({"status": {"phase": phase, "message": uuid::Uuid::new_v4().to_string()}});
        pods.patch_status("a", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }
    for expected in ["+a", "~a", "-a"] {
        assert_eq!(next(&mut watch).await, expected);
    }
}

#[tokio::test]
async fn bookmarks_carry_the_newest_version_of_a_quiet_watch() {
    let (api, client) = sim().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let pods: Api<Pod> = Api::default_namespaced(client);
    let version =
        pods.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut watch = pods.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    created(&maps, config_map("a")).await;
    // The watch may serve the first call before it has seen the change; bookmarks never decrease.
    let mut seen = 0;
    while seen < api.revision() {
        api.send_bookmarks();
        if let Some(Ok(WatchEvent::Bookmark(bookmark))) = watch.next().await {
            let version = bookmark.metadata.resource_version.parse().unwrap();
            assert!(version >= seen);
            seen = version;
        }
    }
}

#[tokio::test]
async fn watch_from_before_compaction_expires() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let before =
        maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    created(&maps, config_map("a")).await;
    created(&maps, config_map("b")).await;
    let now = maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    api.compact();
    let mut old = maps.watch(&WatchParams::default(), &before).await.unwrap().boxed();
    assert_eq!(next(&mut old).await, "!410 Expired");
    assert_eq!(next(&mut old).await, "closed");
    let mut fresh = maps.watch(&WatchParams::default(), &now).await.unwrap().boxed();
    created(&maps, config_map("c")).await;
    assert_eq!(next(&mut fresh).await, "+c");
}

#[tokio::test]
async fn running_watches_can_be_expired_and_closed() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let version = created(&maps, config_map("a")).await.resource_version().unwrap();
    let mut first = maps.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    created(&maps, config_map("b")).await;
    assert_eq!(next(&mut first).await, "+b");
    api.expire_watches();
    assert_eq!(next(&mut first).await, "!410 Expired");
    let version =
        maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut second = maps.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    created(&maps, config_map("c")).await;
    assert_eq!(next(&mut second).await, "+c");
    api.close_watches();
    assert_eq!(next(&mut second).await, "closed");
}

#[tokio::test]
async fn watch_ends_at_its_time_out() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let params = WatchParams::default().timeout(1).disable_bookmarks();
    let watch = maps.watch(&params, "0").await.unwrap();
    let events: Vec<_> = watch.try_collect().await.unwrap();
    assert!(events.is_empty());
}

/// Names known to a kube-rs watcher of the server.
struct Known<S> {
    events: S,
    names: BTreeSet<String>,
    fresh: BTreeSet<String>,
}

impl<S: Stream<Item = watcher::Result<Event<ConfigMap>>> + Unpin> Known<S> {
    /// Reads events until these names are known.
    async fn until(&mut self, expected: &[&str]) {
        while !self.names.iter().eq(expected) {
            let event = tokio::time::timeout(TIMEOUT, self.events.next()).await;
            // The watcher reports a 410 or a broken connection, and then resumes by itself.
            match event.expect("no event").unwrap() {
                Ok(Event::Init) => self.fresh.clear(),
                Ok(Event::InitApply(map)) => drop(self.fresh.insert(map.name_any())),
                Ok(Event::InitDone) => self.names = std::mem::take(&mut self.fresh),
                Ok(Event::Apply(map)) => drop(self.names.insert(map.name_any())),
                Ok(Event::Delete(map)) => drop(self.names.remove(&map.name_any())),
                Err(_) => {}
            }
        }
    }
}

#[tokio::test]
async fn kube_watcher_recovers_from_410_and_disconnects() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    for config in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
        created(&maps, config_map("a")).await;
        let events = watcher(maps.clone(), config).boxed();
        let mut known = Known { events, names: BTreeSet::new(), fresh: BTreeSet::new() };
        known.until(&["a"]).await;
        api.close_watches();
        created(&maps, config_map("b")).await;
        known.until(&["a", "b"]).await;
        maps.delete("a", &DeleteParams::default()).await.unwrap();
        api.expire_watches();
        known.until(&["b"]).await;
        maps.delete("b", &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test]
async fn metadata_watch_has_only_metadata() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let listed = maps.list_metadata(&ListParams::default()).await.unwrap();
    assert_eq!(listed.items[0].name_any(), "a");
    let mut watch = maps.watch_metadata(&WatchParams::default(), "0").await.unwrap().boxed();
    assert_eq!(next(&mut watch).await, "+a");
    let map = maps.replace("a", &PostParams::default(), &config_map("a")).await.unwrap();
    assert_eq!(map.data.unwrap()["a"], "1");
}
