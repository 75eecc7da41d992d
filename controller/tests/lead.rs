//! Lease renewal and writes during a long plan, on real threads and in real time: a plan is blocked
//! until the test has observed the renewals and the allocation.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use std::sync::{Mutex, mpsc};

use fake_api::FakeApi;
use fake_api::controller::{allocation, cluster};
use fake_api::objects::{claim, pod, released_lease};
use k8s_openapi::jiff::Timestamp;
use prometheus_client::registry::Registry;
use serde_json::Value;
use tessera_allocator::PlanSettings;
use tessera_api::names::ManagedDrivers;
use tessera_controller::lead::{Leadership, lead};
use tessera_controller::metrics::Metrics;
use tessera_controller::shell::{Clients, Shell};
use tessera_controller::watch;
use tessera_runtime::supervisor::Supervisor;
use tokio_util::sync::CancellationToken;

fn lease(api: &FakeApi) -> Value {
    api.get("leases", "tessera-system", "tessera-controller").unwrap()["spec"].clone()
}

/// Waits until the Lease has been renewed.
async fn renewed(api: &FakeApi) {
    let before = lease(api)["renewTime"].clone();
    api.until("a renewal", |api| (lease(api)["renewTime"] != before).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn lease_is_renewed_and_writes_are_answered_during_a_plan() {
    let api = cluster(1);
    api.put("leases", released_lease());
    let stop = CancellationToken::new();
    let of_lease = api.clone();
    let connect = Box::new(|| -> futures::future::BoxFuture<'static, _> {
        Box::pin(async move { Ok(of_lease.client()) })
    });
    let mut tasks = Supervisor::new(stop.clone());
    let mut leadership =
        Leadership::start(connect, "tessera-system".to_owned(), "test".to_owned(), &mut tasks)
            .unwrap();
    let tenure = leadership.acquired().await.unwrap().unwrap();

    // The shell reads the wall clock before each step. The clock blocks it there once the pod
    // `second` exists.
    let (entered, plans) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let of_clock = api.clone();
    let clock = move || {
        if of_clock.get("pods", "default", "second").is_some() {
            let _ = entered.send(());
            let _ = gate.lock().unwrap().recv();
        }
        Timestamp::UNIX_EPOCH
    };
    let metrics = Metrics::new(&mut Registry::default());
    let (sender, changes) = watch::queue();
    watch::start(&api.client(), &ManagedDrivers::default(), &metrics, &mut tasks, sender);
    let shell = Shell::new(
        Clients { client: api.client(), evictions: api.client() },
        "test",
        PlanSettings::default(),
        metrics,
        &mut tasks,
    )
    .with_clock(clock)
    .during(tenure);
    let leading =
        tokio::spawn(async move { lead(Some(leadership), shell, changes, &mut tasks).await });

    // The first write of the claim is answered only once the planner is blocked; the second follows
    // the answer.
    let (answer, answered) = mpsc::channel::<()>();
    let (sent, first_write) = mpsc::channel();
    let mut is_first = true;
    api.hold_answers(move |request| {
        if request.path.ends_with("resourceclaims/c") && std::mem::take(&mut is_first) {
            let _ = sent.send(());
            let _ = answered.recv();
        }
    });
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let held_up = tokio::task::spawn_blocking(move || {
        first_write.recv().unwrap();
        first_write
    });
    let first_write = held_up.await.unwrap();
    api.put("resourceclaims", claim("other", "19Gi"));
    api.put("pods", pod("second", &["other"]));
    let plans = tokio::task::spawn_blocking(move || {
        plans.recv().unwrap();
        plans
    });
    let plans = plans.await.unwrap();
    assert_eq!(allocation(&api, "c"), None, "its first write is not answered yet");
    answer.send(()).unwrap();
    api.until("an allocation", |api| allocation(api, "c")).await;
    renewed(&api).await;
    renewed(&api).await;
    assert_eq!(allocation(&api, "other"), None, "the planner is blocked");
    // Unblocks the clock for good: `recv` returns at once after the sender is dropped.
    drop(open);
    api.until("another allocation", |api| allocation(api, "other")).await;
    drop((plans, first_write));
    stop.cancel();
    leading.await.unwrap().unwrap();
    assert_eq!(lease(&api)["holderIdentity"], "", "the Lease is released");
}
