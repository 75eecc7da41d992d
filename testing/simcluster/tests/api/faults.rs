//! Injected faults, as seen by clients of the API server.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Error;
use kube::api::{Api, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use serde_json::json;
use tessera_simcluster::api::{Fault, WatchCache, WatchFault};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{config_map, created, sim_api};

/// Longer than any step here takes on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(300);

async fn version(maps: &Api<ConfigMap>) -> String {
    maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap()
}

#[tokio::test]
async fn server_restart_breaks_connections_and_keeps_objects() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let before = version(&maps).await;
    let mut watch = maps.watch(&WatchParams::default(), &before).await.unwrap().boxed();
    api.simulate_crash();
    let ended = tokio::time::timeout(TIMEOUT, watch.next()).await.expect("the watch did not end");
    assert!(matches!(ended, None | Some(Err(_))), "{ended:?}");
    assert!(matches!(maps.get("a").await, Err(Error::HyperError(_) | Error::Service(_))));
    let observed: Api<ConfigMap> = Api::default_namespaced(api.observer());
    created(&observed, config_map("b")).await;
    api.restart_after_crash(WatchCache::Kept);
    let connected = async {
        while let Err(error) = maps.get("a").await {
            assert!(!matches!(error, Error::Api(_)), "{error}");
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, connected).await.expect("the server did not restart");
    let mut watch = maps.watch(&WatchParams::default(), &before).await.unwrap().boxed();
    let event = watch.next().await.unwrap().unwrap();
    assert!(matches!(event, WatchEvent::Added(map) if map.metadata.name.as_deref() == Some("b")));
}

#[tokio::test]
async fn fresh_watch_cache_resumes_no_earlier_version() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let before = version(&maps).await;
    api.simulate_crash();
    api.restart_after_crash(WatchCache::Fresh);
    let next = async |version: &str| {
        let mut watch = loop {
            if let Ok(watch) = maps.watch(&WatchParams::default(), version).await {
                break watch.boxed();
            }
        };
        created(&maps, config_map(&format!("after-{version}"))).await;
        watch.next().await.unwrap().unwrap()
    };
    assert!(matches!(next(&before).await, WatchEvent::Error(status) if status.code == 410));
    let after = version(&maps).await;
    assert!(matches!(next(&after).await, WatchEvent::Added(_)));
}

#[tokio::test]
async fn watch_faults_do_not_affect_observers() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let observed: Api<ConfigMap> = Api::default_namespaced(api.observer());
    let lag = Duration::from_millis(400);
    for (fault, name) in
        [(WatchFault::Delay(lag), "a"), (WatchFault::Break, "b"), (WatchFault::Expire, "c")]
    {
        let start = version(&maps).await;
        let mut watch = maps.watch(&WatchParams::default(), &start).await.unwrap().boxed();
        let mut unharmed = observed.watch(&WatchParams::default(), &start).await.unwrap().boxed();
        api.set_watch_fault_hook(Some(Arc::new(move |_| fault)));
        let began = Instant::now();
        created(&maps, config_map(name)).await;
        assert!(matches!(unharmed.next().await, Some(Ok(WatchEvent::Added(_)))), "{fault:?}");
        let seen = tokio::time::timeout(TIMEOUT, watch.next()).await.unwrap();
        match fault {
            WatchFault::Delay(_) => {
                assert!(matches!(seen, Some(Ok(WatchEvent::Added(_)))), "{seen:?}");
                assert!(began.elapsed() >= lag, "{:?}", began.elapsed());
            }
            WatchFault::Break => assert!(seen.is_none(), "{seen:?}"),
            _ => assert!(
                matches!(&seen, Some(Ok(WatchEvent::Error(status))) if status.code == 410),
                "{seen:?}"
            ),
        }
        api.set_watch_fault_hook(None);
    }
}

#[tokio::test]
async fn watcher_relists_after_410_without_loss() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let mut events = watcher(maps.clone(), watcher::Config::default()).default_backoff().boxed();
    let mut until = async |wanted: &str| loop {
        match tokio::time::timeout(TIMEOUT, events.next()).await.expect("no event").unwrap() {
            Ok(watcher::Event::Apply(map) | watcher::Event::InitApply(map))
                if map.metadata.name.as_deref() == Some(wanted) =>
            {
                return;
            }
            _ => {}
        }
    };
    until("a").await;
    api.set_watch_fault_hook(Some(Arc::new(|_| WatchFault::Expire)));
    created(&maps, config_map("b")).await;
    until("b").await;
}

#[tokio::test]
async fn conflicting_write_makes_the_request_stale() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let map = created(&maps, config_map("a")).await;
    api.set_fault_hook(Some(Arc::new(|request| match request.verb {
        "patch" => Fault::ConflictingWrite,
        _ => Fault::None,
    })));
    let patch =
        json!({"metadata": {"resourceVersion": map.metadata.resource_version}, "data": {"a": "2"}});
    let stale = maps.patch("a", &PatchParams::default(), &Patch::Merge(patch)).await;
    assert!(matches!(stale, Err(Error::Api(status)) if status.code == 409));
    let now = maps.get("a").await.unwrap();
    assert_ne!(now.metadata.resource_version, map.metadata.resource_version);
    assert_eq!(now.metadata.annotations.unwrap().len(), 1);
    assert_eq!(now.data, map.data);
}

#[tokio::test]
async fn held_request_is_served_when_released() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let gate = CancellationToken::new();
    let held = gate.clone();
    api.set_fault_hook(Some(Arc::new(move |request| match request.verb {
        "create" => Fault::Hold(held.clone()),
        _ => Fault::None,
    })));
    let creating = tokio::spawn({
        let maps = maps.clone();
        async move { created(&maps, config_map("a")).await }
    });
    assert!(maps.get_opt("a").await.unwrap().is_none());
    gate.cancel();
    creating.await.unwrap();
    assert!(maps.get_opt("a").await.unwrap().is_some());
}

#[tokio::test]
async fn request_with_held_response_is_served() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let observed: Api<ConfigMap> = Api::default_namespaced(api.observer());
    let (serve, answer) = (CancellationToken::new(), CancellationToken::new());
    let held = Fault::HoldResponse { serve: serve.clone(), answer: answer.clone() };
    api.set_fault_hook(Some(Arc::new(move |_| held.clone())));
    let mut watch = observed.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    let mut creating = tokio::spawn(async move { created(&maps, config_map("a")).await });
    serve.cancel();
    let event =
        tokio::time::timeout(TIMEOUT, watch.next()).await.expect("the request was not served");
    assert!(matches!(event, Some(Ok(WatchEvent::Added(_)))), "{event:?}");
    let early = tokio::time::timeout(Duration::from_millis(50), &mut creating).await;
    assert!(early.is_err(), "the response was sent");
    answer.cancel();
    creating.await.unwrap();
}

#[tokio::test]
async fn timestamps_follow_the_server_clock() {
    let (api, maps) = sim_api::<ConfigMap>().await;
    let mut stamps = Vec::new();
    for (name, ahead) in [("a", 0), ("b", 3600), ("c", -3600)] {
        api.set_clock_ahead(ahead);
        let map = created(&maps, config_map(name)).await;
        stamps.push(map.metadata.creation_timestamp.unwrap().0.as_second());
    }
    assert!((3599..3700).contains(&(stamps[1] - stamps[0])), "{stamps:?}");
    assert!((3500..3601).contains(&(stamps[0] - stamps[2])), "{stamps:?}");
}
