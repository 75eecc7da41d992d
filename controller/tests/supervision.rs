//! A task or thread that ends unexpectedly ends the controller, with its name and the cause.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use std::time::Duration;

use fake_api::FakeApi;
use fake_api::controller::cluster;
use fake_api::objects::{claim, pod, released_lease};
use futures::future::BoxFuture;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use prometheus_client::registry::Registry;
use tessera_allocator::PlanSettings;
use tessera_api::names::ManagedDrivers;
use tessera_controller::lead::{Leadership, lead};
use tessera_controller::metrics::Metrics;
use tessera_controller::shell::{Clients, Shell};
use tessera_controller::watch;
use tessera_runtime::supervisor::Supervisor;
use tokio_util::sync::CancellationToken;

/// Returns a client of which the task that makes a request panics if `is_bad` holds for the method
/// and path.
fn panicking(api: &FakeApi, is_bad: fn(&str, &str) -> bool) -> Client {
    let inner = api.client();
    let serve = move |request: axum::http::Request<kube::client::Body>| {
        let inner = inner.clone();
        async move {
            let is_bad = is_bad(request.method().as_str(), request.uri().path());
            assert!(!is_bad, "cannot read the answer");
            inner.send(request).await
        }
    };
    Client::new(tower::service_fn(serve), "default")
}

/// Returns a cluster with a pending pod that fits and one that does not.
fn busy_cluster() -> FakeApi {
    let api = cluster(1);
    for (name, memory) in [("small", "19Gi"), ("large", "90Gi")] {
        api.put("resourceclaims", claim(name, memory));
        api.put("pods", pod(name, &[name]));
    }
    api
}

/// Runs the core with this client and clock until it ends by itself, and returns the error.
async fn failure(client: Client, clock: fn() -> Timestamp) -> String {
    let mut tasks = Supervisor::new(CancellationToken::new());
    let metrics = Metrics::new(&mut Registry::default());
    let (sender, changes) = watch::queue();
    watch::start(&client, &ManagedDrivers::default(), &metrics, &mut tasks, sender);
    let settings = PlanSettings::default();
    let shell = Shell::new(
        Clients { evictions: client.clone(), client },
        "test",
        settings,
        metrics,
        &mut tasks,
    )
    .with_clock(clock);
    let led = lead(None, shell, changes, &mut tasks);
    let led = tokio::time::timeout(Duration::from_secs(120), led).await;
    led.expect("the controller ends").unwrap_err().to_string()
}

fn epoch() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

/// Returns true for requests that a case answers with a fault, by verb and path.
type IsAffected = fn(&str, &str) -> bool;

#[tokio::test]
async fn panic_of_a_task_ends_the_controller_with_its_name() {
    let cases: [(&str, IsAffected); 4] = [
        ("watch-resourceslices", |_, path| path.ends_with("/resourceslices")),
        ("watch-pods", |_, path| path.ends_with("/pods")),
        ("events", |method, path| method == "POST" && path.ends_with("/events")),
        ("claim-writes", |method, path| method == "PATCH" && path.contains("/resourceclaims/")),
    ];
    for (task, is_bad) in cases {
        assert_eq!(
            failure(panicking(&busy_cluster(), is_bad), epoch).await,
            format!("task {task} ended unexpectedly: it panicked: cannot read the answer")
        );
    }
}

#[tokio::test]
async fn panic_of_the_core_ends_the_controller_with_its_name() {
    let error = failure(busy_cluster().client(), || panic!("no clock")).await;
    assert_eq!(error, "task core ended unexpectedly: it panicked: no clock");
}

#[tokio::test]
async fn panic_of_the_lease_thread_is_reported_by_its_supervisor() {
    let api = FakeApi::new();
    api.put("leases", released_lease());
    let client = panicking(&api, |method, _| method == "PUT");
    // A connection belongs to the runtime that created it.
    let connect = move || -> BoxFuture<'static, _> { Box::pin(async move { Ok(client) }) };
    let mut tasks = Supervisor::new(CancellationToken::new());
    let (namespace, identity) = ("tessera-system".to_owned(), "test".to_owned());
    let mut leadership =
        Leadership::start(Box::new(connect), namespace, identity, &mut tasks).unwrap();
    let failure = tokio::select! {
        biased;
        acquired = leadership.acquired() => panic!("{acquired:?}"),
        failure = tasks.failed() => failure,
    };
    let expected = "task lease ended unexpectedly: it panicked: cannot read the answer";
    assert_eq!(failure.to_string(), expected);
}
