//! Waiting by watch, with a deadline that says what was seen last.

use std::fmt::Debug;
use std::time::Duration;

use futures::TryStreamExt;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

/// A wait that was in vain.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The deadline passed.
    #[error("waited {waited:?} for {what}; last seen: {last}")]
    TooLong {
        /// For what.
        what: String,
        /// How long.
        waited: Duration,
        /// The last state that did not do.
        last: String,
    },
    /// It can no longer come true.
    #[error("{what} cannot come true any more: {seen}")]
    Hopeless {
        /// What was waited for.
        what: String,
        /// What speaks against it.
        seen: String,
    },
}

/// What a look at the objects said.
#[derive(Debug)]
pub enum Verdict<T> {
    /// That is it.
    Done(T),
    /// Not yet; this is what is there.
    NotYet(String),
    /// It will never be.
    Hopeless(String),
}

/// Watches objects until `judge` is content with all of them together.
///
/// # Errors
/// [`WaitError`]. Errors of the watch itself are retried until the deadline.
pub async fn until<K, T>(
    api: Api<K>,
    selector: watcher::Config,
    what: &str,
    within: Duration,
    mut judge: impl FnMut(&[K]) -> Verdict<T>,
) -> Result<T, WaitError>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut stream = Box::pin(watcher(api, selector).default_backoff());
    let mut objects: Vec<K> = Vec::new();
    let mut listing = true;
    let mut last = "nothing".to_owned();
    let watching = async {
        loop {
            match stream.try_next().await {
                Ok(Some(watcher::Event::Init)) => {
                    objects.clear();
                    listing = true;
                }
                Ok(Some(watcher::Event::InitDone)) => listing = false,
                Ok(Some(watcher::Event::Apply(object) | watcher::Event::InitApply(object))) => {
                    remove(&mut objects, &object);
                    objects.push(object);
                }
                Ok(Some(watcher::Event::Delete(object))) => remove(&mut objects, &object),
                Ok(None) => unreachable!("invariant: a watcher never ends"),
                Err(error) => last = format!("the watch failed: {error}"),
            }
            if listing {
                continue;
            }
            match judge(&objects) {
                Verdict::Done(found) => return Ok(found),
                Verdict::NotYet(seen) => last = seen,
                Verdict::Hopeless(seen) => return Err(seen),
            }
        }
    };
    match tokio::time::timeout(within, watching).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(seen)) => Err(WaitError::Hopeless { what: what.to_owned(), seen }),
        Err(_) => Err(WaitError::TooLong { what: what.to_owned(), waited: within, last }),
    }
}

fn remove<K: Resource>(objects: &mut Vec<K>, gone: &K) {
    let key = |object: &K| (object.meta().namespace.clone(), object.meta().name.clone());
    objects.retain(|object| key(object) != key(gone));
}

/// Watches one object by name.
///
/// # Errors
/// As [`until`].
pub async fn until_one<K, T>(
    api: Api<K>,
    name: &str,
    what: &str,
    within: Duration,
    mut judge: impl FnMut(Option<&K>) -> Verdict<T>,
) -> Result<T, WaitError>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let selector = watcher::Config::default().fields(&format!("metadata.name={name}"));
    until(api, selector, what, within, |objects| judge(objects.first())).await
}
