//! One computation at a time, shared by all who wait for its result.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

/// Pause after a computation, in durations of the computation: it takes at most a fifth of the
/// time.
const PAUSES: u32 = 4;

/// Upper bound of the pause.
const MAX_PAUSE: Duration = Duration::from_secs(5);

type Compute<T> = dyn Fn() -> Pin<Box<dyn Future<Output = T> + Send>> + Send + Sync;

/// A computation whose result is shared by all who wait for it.
///
/// A result is never older than the request for it: callers that arrive while a computation runs
/// share the next one, which begins after a pause. So the work does not depend on the number of
/// callers. A computation continues if its callers do not wait any longer.
pub struct SingleFlight<T> {
    compute: Arc<Compute<T>>,
    last: Arc<Mutex<LastFlight<T>>>,
}

/// The last computation.
struct LastFlight<T> {
    /// The time at which it began, and its result.
    result: Option<(Instant, T)>,
    /// The earliest time of the next one.
    next: Instant,
}

impl<T> Clone for SingleFlight<T> {
    fn clone(&self) -> Self {
        Self { compute: Arc::clone(&self.compute), last: Arc::clone(&self.last) }
    }
}

impl<T> std::fmt::Debug for SingleFlight<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SingleFlight")
    }
}

impl<T: Clone + Send + 'static> SingleFlight<T> {
    /// Returns a shared computation of `compute`.
    #[must_use]
    pub fn new<F: Future<Output = T> + Send + 'static>(
        compute: impl Fn() -> F + Send + Sync + 'static,
    ) -> Self {
        Self {
            compute: Arc::new(move || Box::pin(compute())),
            last: Arc::new(Mutex::new(LastFlight { result: None, next: Instant::now() })),
        }
    }

    /// Returns a shared computation of `compute`, which may block.
    #[must_use]
    pub fn blocking(compute: impl Fn() -> T + Send + Sync + 'static) -> Self {
        let compute = Arc::new(compute);
        Self::new(move || {
            let compute = Arc::clone(&compute);
            async move {
                let computed = tokio::task::spawn_blocking(move || compute()).await;
                computed.unwrap_or_else(|error| match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(error) => panic!("the runtime stops: {error}"),
                })
            }
        })
    }

    /// Returns the result of a computation that began after the call, or `None` if it panicked.
    pub async fn get(&self) -> Option<T> {
        let arrived = Instant::now();
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some((begun, result)) = &last.result
            && *begun >= arrived
        {
            return Some(result.clone());
        }
        let compute = Arc::clone(&self.compute);
        // A task, since the caller may be dropped meanwhile.
        let flight = tokio::spawn(async move {
            sleep_until(last.next).await;
            let begun = Instant::now();
            let result = compute().await;
            let ended = Instant::now();
            last.next = ended + ((ended - begun) * PAUSES).min(MAX_PAUSE);
            last.result = Some((begun, result.clone()));
            result
        });
        flight.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures::future::join_all;
    use tokio::{sync::Semaphore, time::sleep};

    use super::*;

    /// Returns a computation of 100 ms that counts its runs and returns its number.
    fn counting() -> (Arc<AtomicU32>, SingleFlight<u32>) {
        let count = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&count);
        let flight = SingleFlight::new(move || {
            let number = counted.fetch_add(1, Ordering::SeqCst) + 1;
            async move {
                sleep(Duration::from_millis(100)).await;
                number
            }
        });
        (count, flight)
    }

    #[tokio::test(start_paused = true)]
    async fn callers_share_one_computation_at_a_time() {
        let (count, flight) = counting();
        let first = join_all((0..1000).map(|_| flight.get()));
        assert!(first.await.iter().all(|result| matches!(result, Some(1 | 2))));
        assert!(count.load(Ordering::SeqCst) <= 2);
    }

    #[tokio::test(start_paused = true)]
    async fn result_is_not_older_than_its_request() {
        let (_, flight) = counting();
        assert_eq!(flight.get().await, Some(1));
        let asked = Instant::now();
        assert_eq!(flight.get().await, Some(2));
        assert_eq!(asked.elapsed(), Duration::from_millis(500), "the pause, then the computation");
    }

    #[tokio::test]
    async fn computation_outlives_its_caller() {
        let go = Arc::new(Semaphore::new(0));
        let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
        let gate = Arc::clone(&go);
        let flight = SingleFlight::new(move || {
            started.send(()).expect("the test waits");
            let gate = Arc::clone(&gate);
            async move { gate.acquire().await.expect("open").forget() }
        });
        let caller = tokio::spawn({
            let flight = flight.clone();
            async move { flight.get().await }
        });
        starts.recv().await.expect("started");
        caller.abort();
        caller.await.expect_err("aborted");
        let next = tokio::spawn({
            let flight = flight.clone();
            async move { flight.get().await }
        });
        tokio::task::yield_now().await;
        starts.try_recv().expect_err("the first one still runs");
        go.add_permits(2);
        assert_eq!(next.await.expect("no panic"), Some(()));
    }

    #[tokio::test]
    async fn panic_is_reported_and_the_next_call_computes_again() {
        let count = Arc::new(AtomicU32::new(0));
        let flight = SingleFlight::blocking(move || {
            let number = count.fetch_add(1, Ordering::SeqCst);
            assert!(number > 0, "the first one fails");
            number
        });
        assert_eq!(flight.get().await, None);
        assert_eq!(flight.get().await, Some(1));
    }
}
