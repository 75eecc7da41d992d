//! Waiting by watch, with a deadline that says what was seen last.

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, TryStreamExt};
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

/// Objects as a watch shows them, change after change.
pub struct Watch<K> {
    stream: Pin<Box<dyn Stream<Item = watcher::Result<watcher::Event<K>>> + Send>>,
    objects: Vec<K>,
    /// The objects are not all known: of a listing only a part is in.
    listing: bool,
}

impl<K> Watch<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    /// A watch that begins with the first look.
    fn of(api: Api<K>, selector: watcher::Config) -> Self {
        let stream = Box::pin(watcher(api, selector).default_backoff());
        Self { stream, objects: Vec::new(), listing: true }
    }

    /// A watch that has begun: unless it is interrupted, it shows every state that an object is in
    /// after this, also one that is over at once.
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn begun(
        api: Api<K>,
        selector: watcher::Config,
        within: Duration,
    ) -> Result<Self, WaitError> {
        let mut watch = Self::of(api, selector);
        watch.until("a watch to begin", within, |_| Verdict::Done(())).await?;
        Ok(watch)
    }

    /// Waits until `judge` is content with all of the objects together.
    ///
    /// # Errors
    /// [`WaitError`]. Errors of the watch itself are retried until the deadline.
    pub async fn until<T>(
        &mut self,
        what: &str,
        within: Duration,
        mut judge: impl FnMut(&[K]) -> Verdict<T>,
    ) -> Result<T, WaitError> {
        let mut last = "nothing".to_owned();
        let judging = async {
            loop {
                if !self.listing {
                    match judge(&self.objects) {
                        Verdict::Done(found) => return Ok(found),
                        Verdict::NotYet(seen) => last = seen,
                        Verdict::Hopeless(seen) => return Err(seen),
                    }
                }
                if let Err(error) = self.next().await {
                    last = format!("the watch failed: {error}");
                }
            }
        };
        match tokio::time::timeout(within, judging).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(seen)) => Err(WaitError::Hopeless { what: what.to_owned(), seen }),
            Err(_) => Err(WaitError::TooLong { what: what.to_owned(), waited: within, last }),
        }
    }

    /// Takes in one change. After an error the watch goes on by itself.
    async fn next(&mut self) -> Result<(), watcher::Error> {
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

/// Watches objects until `judge` is content with all of them together. A state that is over before
/// the watch begins is not seen: for that, see [`Watch::begun`].
///
/// # Errors
/// [`WaitError`]. Errors of the watch itself are retried until the deadline.
pub async fn until<K, T>(
    api: Api<K>,
    selector: watcher::Config,
    what: &str,
    within: Duration,
    judge: impl FnMut(&[K]) -> Verdict<T>,
) -> Result<T, WaitError>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    Watch::of(api, selector).until(what, within, judge).await
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
