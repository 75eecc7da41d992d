//! Fault points: named places in a program at which a crash test kills it, or holds it while
//! something else happens.
//!
//! Built only with the feature `fault-points` of the driver and the controller, which nothing that
//! ships has. A program declares its points in one list, so that a test can demand that it has
//! tried them all:
//!
//! ```
//! use tessera_runtime::fault_points::FaultPoints;
//!
//! static POINTS: FaultPoints = FaultPoints::new(&["prepare-started", "prepare-completed"]);
//! POINTS.reach("prepare-started"); // goes on at once: nothing is armed
//! ```
//!
//! Armed over HTTP ([`FaultPoints::routes`]), which dies with the process, so that a point kills
//! once:
//!
//! | request | effect |
//! |---|---|
//! | `GET /fault-points` | every declared point: how often it was reached, what it is armed with, how many wait at it |
//! | `PUT /fault-points/NAME/kill` | whoever reaches it next ends the process, as `kill -9` would |
//! | `PUT /fault-points/NAME/hold` | whoever reaches it waits |
//! | `DELETE /fault-points/NAME` | disarms it; who waits there goes on |

mod http;

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

/// What happens to who reaches a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// The process ends, without a chance to clean up.
    Kill,
    /// The caller waits until the point is disarmed.
    Hold,
}

/// What is known of one point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Point {
    /// How often it was reached.
    pub hits: u64,
    /// What happens there.
    pub armed: Option<Fault>,
    /// How many wait there now.
    pub waiting: u64,
}

/// A name that is not declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undeclared(pub String);

impl std::fmt::Display for Undeclared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no fault point is named `{}`; GET /fault-points lists them", self.0)
    }
}

impl std::error::Error for Undeclared {}

/// The fault points of a program.
#[derive(Debug)]
pub struct FaultPoints {
    names: &'static [&'static str],
    /// Those that were reached or armed.
    points: Mutex<BTreeMap<&'static str, Point>>,
    disarmed: Condvar,
}

impl FaultPoints {
    /// The points of these names, none of them armed.
    #[must_use]
    pub const fn new(names: &'static [&'static str]) -> Self {
        Self { names, points: Mutex::new(BTreeMap::new()), disarmed: Condvar::new() }
    }

    /// The program has come to the point. Blocks as long as it is held there.
    ///
    /// # Panics
    /// If the point is not declared: a test that arms all of them would miss it.
    pub fn reach(&self, name: &'static str) {
        assert!(self.names.contains(&name), "the fault point `{name}` is not declared");
        let mut points = self.lock();
        let point = points.entry(name).or_default();
        point.hits += 1;
        match point.armed {
            None => return,
            Some(Fault::Kill) => kill_this_process(),
            Some(Fault::Hold) => point.waiting += 1,
        }
        let is_held = |points: &mut BTreeMap<_, Point>| points[name].armed == Some(Fault::Hold);
        let mut points =
            self.disarmed.wait_while(points, is_held).unwrap_or_else(PoisonError::into_inner);
        points.entry(name).or_default().waiting -= 1;
    }

    /// [`reach`](Self::reach) for asynchronous code: what waits is a task.
    pub async fn reach_async(&'static self, name: &'static str) {
        // A task that panicked has met an undeclared name, and so does the caller.
        tokio::task::spawn_blocking(move || self.reach(name))
            .await
            .expect("the fault point is declared");
    }

    /// From now on, `fault` happens to who reaches the point. Those who wait there go on if it is
    /// not a hold.
    ///
    /// # Errors
    /// The point is not declared.
    pub fn arm(&self, name: &str, fault: Fault) -> Result<(), Undeclared> {
        self.set(name, Some(fault))
    }

    /// Nothing happens at the point any more, and those who wait there go on.
    ///
    /// # Errors
    /// The point is not declared.
    pub fn disarm(&self, name: &str) -> Result<(), Undeclared> {
        self.set(name, None)
    }

    /// All declared points.
    #[must_use]
    pub fn all(&self) -> BTreeMap<&'static str, Point> {
        let points = self.lock();
        self.names
            .iter()
            .map(|name| (*name, points.get(name).copied().unwrap_or_default()))
            .collect()
    }

    fn set(&self, name: &str, fault: Option<Fault>) -> Result<(), Undeclared> {
        let declared = self.names.iter().find(|declared| **declared == name);
        let declared = declared.ok_or_else(|| Undeclared(name.to_owned()))?;
        self.lock().entry(declared).or_default().armed = fault;
        self.disarmed.notify_all();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Point>> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends this process as `kill -9` would: nothing is flushed, nothing is dropped.
fn kill_this_process() -> ! {
    // The kernel keeps process 1 of a container from killing itself so. In `abort`, what nobody
    // handles ends it after all, as abruptly.
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort()
}
