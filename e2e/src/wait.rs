//! Waits for conditions of watched objects. Each wait has a deadline, and its error reports the
//! last observed state.

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, TryStreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

/// Pause between two checks of a state that no watch reports.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Error of a wait.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The deadline passed.
    #[error("waited {waited:?} for {condition}; last seen: {last}")]
    TooLong {
        /// The condition.
        condition: String,
        /// The time limit.
        waited: Duration,
        /// The last observed state.
        last: String,
    },
    /// The condition can no longer be met.
    #[error("{condition}: no longer possible: {seen}")]
    Impossible {
        /// The condition.
        condition: String,
        /// The observed state that excludes it.
        seen: String,
    },
}

/// Result of a check of the observed objects.
#[derive(Debug)]
pub enum CheckResult<T> {
    /// The condition is met.
    Done(T),
    /// The condition is not met yet; the observed state.
    Pending(String),
    /// The condition can no longer be met; the observed state.
    Impossible(String),
}

impl CheckResult<()> {
    /// Returns `Done` if the condition is met, otherwise `Pending` with the observed state.
    pub fn done_if(is_met: bool, observed: impl FnOnce() -> String) -> Self {
        if is_met { Self::Done(()) } else { Self::Pending(observed()) }
    }

    /// Returns `Done` if no object is left. The observed state has the whole objects, including
    /// their finalizers.
    pub fn none_left<K: Resource + Serialize>(objects: &[K]) -> Self {
        let describe = |object: &K| format!("{} ({})", object.name_any(), json!(object));
        let left: Vec<_> = objects.iter().map(describe).collect();
        Self::done_if(left.is_empty(), || left.join(", "))
    }

    /// Returns `Done` if the object is deleted.
    pub fn deleted<K: Resource + Serialize>(object: Option<&K>) -> Self {
        Self::none_left(object.map_or(&[], std::slice::from_ref))
    }
}

/// An object that can be watched.
pub trait Watched: Resource + Clone + DeserializeOwned + Debug + Send + 'static {}

impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> Watched for K {}

/// Current state of watched objects.
pub struct Watch<K> {
    stream: Pin<Box<dyn Stream<Item = watcher::Result<watcher::Event<K>>> + Send>>,
    objects: Vec<K>,
    /// A listing is in progress, so the objects are incomplete.
    listing: bool,
}

impl<K: Watched> Watch<K> {
    /// Creates a watch that starts when it is first polled.
    fn new(api: Api<K>, selector: watcher::Config) -> Self {
        let stream = Box::pin(watcher(api, selector).default_backoff());
        Self { stream, objects: Vec::new(), listing: true }
    }

    /// Starts a watch. Unless it is interrupted, it observes every later state of an object,
    /// however short.
    ///
    /// # Errors
    /// Returns a [`WaitError`] if the watch does not start in time.
    pub async fn started(
        api: Api<K>,
        selector: watcher::Config,
        within: Duration,
    ) -> Result<Self, WaitError> {
        let mut watch = Self::new(api, selector);
        watch.until("a watch to start", within, |_| CheckResult::Done(())).await?;
        Ok(watch)
    }

    /// Waits until `check` accepts the objects.
    ///
    /// # Errors
    /// Returns a [`WaitError`]. Errors of the watch are retried until the deadline.
    pub async fn until<T>(
        &mut self,
        condition: &str,
        within: Duration,
        mut check: impl FnMut(&[K]) -> CheckResult<T>,
    ) -> Result<T, WaitError> {
        let mut last = "nothing".to_owned();
        let judging = async {
            loop {
                if !self.listing {
                    match check(&self.objects) {
                        CheckResult::Done(found) => return Ok(found),
                        CheckResult::Pending(seen) => last = seen,
                        CheckResult::Impossible(seen) => return Err(seen),
                    }
                }
                if let Err(error) = self.apply_next().await {
                    last = format!("watch failed: {error}");
                }
            }
        };
        match tokio::time::timeout(within, judging).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(seen)) => Err(WaitError::Impossible { condition: condition.to_owned(), seen }),
            Err(_) => {
                Err(WaitError::TooLong { condition: condition.to_owned(), waited: within, last })
            }
        }
    }

    /// Applies the next watch event. The watch recovers from errors by itself.
    async fn apply_next(&mut self) -> Result<(), watcher::Error> {
        match self.stream.try_next().await? {
            Some(watcher::Event::Init) => {
                self.objects.clear();
                self.listing = true;
            }
            Some(watcher::Event::InitDone) => self.listing = false,
            Some(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                remove(&mut self.objects, &object);
                self.objects.push(object);
            }
            Some(watcher::Event::Delete(object)) => remove(&mut self.objects, &object),
            None => unreachable!("invariant: a watcher never ends"),
        }
        Ok(())
    }
}

/// Watches objects until `check` accepts them. States before the start of the watch are not
/// observed; see [`Watch::started`].
///
/// # Errors
/// Returns a [`WaitError`]. Errors of the watch are retried until the deadline.
pub async fn until<K: Watched, T>(
    api: Api<K>,
    selector: watcher::Config,
    condition: &str,
    within: Duration,
    check: impl FnMut(&[K]) -> CheckResult<T>,
) -> Result<T, WaitError> {
    Watch::new(api, selector).until(condition, within, check).await
}

/// Checks a state that no watch reports, until `check` accepts it.
///
/// # Errors
/// Returns a [`WaitError`], or the error of a check.
pub async fn poll<T>(
    condition: &str,
    within: Duration,
    mut check: impl AsyncFnMut() -> anyhow::Result<CheckResult<T>>,
) -> anyhow::Result<T> {
    let mut last = "nothing".to_owned();
    let checks = async {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        loop {
            ticks.tick().await;
            match check().await? {
                CheckResult::Done(found) => return Ok(found),
                CheckResult::Pending(seen) => last = seen,
                CheckResult::Impossible(seen) => {
                    let condition = condition.to_owned();
                    return Err(WaitError::Impossible { condition, seen }.into());
                }
            }
        }
    };
    tokio::time::timeout(within, checks).await.unwrap_or_else(|_| {
        Err(WaitError::TooLong { condition: condition.to_owned(), waited: within, last }.into())
    })
}

fn remove<K: Resource>(objects: &mut Vec<K>, removed: &K) {
    let key = |object: &K| (object.meta().namespace.clone(), object.meta().name.clone());
    objects.retain(|object| key(object) != key(removed));
}

/// Watches one object by name until `check` accepts it.
///
/// # Errors
/// Returns a [`WaitError`], as [`until`].
pub async fn until_one<K: Watched, T>(
    api: Api<K>,
    name: &str,
    condition: &str,
    within: Duration,
    mut check: impl FnMut(Option<&K>) -> CheckResult<T>,
) -> Result<T, WaitError> {
    let selector = watcher::Config::default().fields(&format!("metadata.name={name}"));
    until(api, selector, condition, within, |objects| check(objects.first())).await
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn poll_ends_with_the_result_or_the_error_of_a_check() {
        let mut checks = 0;
        let third = poll("the third check", LIMIT, async || {
            checks += 1;
            let seen = || checks.to_string();
            Ok(if checks == 3 { CheckResult::Done(checks) } else { CheckResult::Pending(seen()) })
        });
        assert_eq!(third.await.unwrap(), 3);
        let fails = poll::<()>("a failure", LIMIT, async || Err(anyhow::anyhow!("refused")));
        assert_eq!(fails.await.unwrap_err().to_string(), "refused");
        let impossible = async || Ok(CheckResult::<()>::Impossible("deleted".to_owned()));
        let error = poll("an object", LIMIT, impossible).await.unwrap_err();
        assert_eq!(error.to_string(), "an object: no longer possible: deleted");
    }

    #[tokio::test(start_paused = true)]
    async fn poll_ends_at_its_limit_with_what_it_saw_last() {
        let pending = async || Ok(CheckResult::<()>::Pending("2 files".to_owned()));
        let error = poll("no files", LIMIT, pending).await.unwrap_err();
        assert_eq!(error.to_string(), "waited 60s for no files; last seen: 2 files");
    }
}
