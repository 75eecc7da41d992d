//! Tasks that end, panic and stop under a supervisor.

use std::{future::pending, time::Duration};

use tessera_runtime::supervisor::{Supervisor, blocking};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

fn supervisor() -> (CancellationToken, Supervisor) {
    let stop = CancellationToken::new();
    (stop.clone(), Supervisor::new(stop))
}

async fn failure_of(mut tasks: Supervisor) -> String {
    timeout(Duration::from_secs(30), tasks.failed()).await.expect("a failure").to_string()
}

#[tokio::test]
async fn reports_task_that_returns() {
    let (_stop, mut tasks) = supervisor();
    tasks.spawn("steady", pending());
    tasks.spawn("early", async {});
    assert_eq!(failure_of(tasks).await, "task early ended unexpectedly: it returned");
}

#[tokio::test]
async fn reports_task_that_panics() {
    let (_stop, mut tasks) = supervisor();
    tasks.spawn("faulty", async { panic!("index {} is out of range", 7) });
    assert_eq!(
        failure_of(tasks).await,
        "task faulty ended unexpectedly: it panicked: index 7 is out of range"
    );
}

#[tokio::test]
async fn reports_thread_that_panics_or_returns() {
    let (_stop, mut tasks) = supervisor();
    tasks.spawn_thread("faulty", || panic!("lost")).expect("a thread");
    assert_eq!(failure_of(tasks).await, "task faulty ended unexpectedly: it panicked: lost");
    let (_stop, mut tasks) = supervisor();
    tasks.spawn_thread("early", || {}).expect("a thread");
    assert_eq!(failure_of(tasks).await, "task early ended unexpectedly: it returned");
}

#[tokio::test]
async fn panic_in_blocking_work_reaches_its_task() {
    let (_stop, mut tasks) = supervisor();
    tasks.spawn("round", async { blocking(|| panic!("bad ledger")).await });
    assert_eq!(failure_of(tasks).await, "task round ended unexpectedly: it panicked: bad ledger");
}

#[tokio::test]
async fn names_the_panic_and_not_its_consequence() {
    let (_stop, mut tasks) = supervisor();
    let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
    tasks.spawn("consumer", async { drop(receiver.await) });
    tasks.spawn("producer", async move {
        drop(sender);
        tokio::task::yield_now().await;
        panic!("cause")
    });
    assert_eq!(failure_of(tasks).await, "task producer ended unexpectedly: it panicked: cause");
}

#[tokio::test(start_paused = true)]
async fn orderly_stop_is_no_failure() {
    let (stop, mut tasks) = supervisor();
    let token = stop.clone();
    tasks.spawn("orderly", async move { token.cancelled().await });
    tasks.spawn_thread("blocked", std::thread::park).expect("a thread");
    stop.cancel();
    let early = timeout(Duration::from_millis(300), tasks.failed()).await;
    assert!(early.is_err(), "{early:?}");
    tasks.shut_down(Duration::from_secs(30)).await;
}

#[tokio::test(start_paused = true)]
async fn shutdown_aborts_task_that_does_not_end() {
    let (stop, mut tasks) = supervisor();
    let (sender, mut receiver) = tokio::sync::mpsc::channel::<()>(1);
    tasks.spawn("stubborn", async move {
        pending::<()>().await;
        drop(sender);
    });
    stop.cancel();
    tasks.shut_down(Duration::from_secs(5)).await;
    assert_eq!(receiver.recv().await, None, "the task was dropped");
}
