//! Fault points: named places in a program at which a crash test kills or holds it.
//!
//! Built only with the feature `fault-points` of the driver and the controller, which is not
//! shipped. A program declares its points in one list, so that a test can check that all of them
//! are reached:
//!
//! ```
//! use tessera_runtime::fault_points::FaultPoints;
//!
//! static POINTS: FaultPoints = FaultPoints::new(&["prepare-started", "prepare-completed"]);
//! POINTS.reach("prepare-started"); // returns immediately: the point is not armed
//! ```
//!
//! Points are armed over HTTP ([`FaultPoints::routes`]). Armed points end with the process, so that
//! each kills once:
//!
//! | request | effect |
//! |---|---|
//! | `GET /fault-points` | lists declared points with their hits, armed fault and waiting threads |
//! | `PUT /fault-points/NAME/kill` | the next thread that reaches it kills the process |
//! | `PUT /fault-points/NAME/hold` | threads that reach it wait |
//! | `DELETE /fault-points/NAME` | disarms it, and waiting threads continue |

mod http;

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

/// Fault that is injected at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// The process is killed, without cleaning up.
    Kill,
    /// The caller waits until the point is disarmed.
    Hold,
}

/// State of a point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FaultPointState {
    /// Number of times that it was reached.
    pub hits: u64,
    /// The armed fault.
    pub armed: Option<Fault>,
    /// Number of threads that wait there.
    pub waiting: u64,
}

/// Error for a name that is not declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndeclaredPoint(pub String);

impl std::fmt::Display for UndeclaredPoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unknown fault point `{}`: see GET /fault-points", self.0)
    }
}

impl std::error::Error for UndeclaredPoint {}

/// The fault points of a program.
#[derive(Debug)]
pub struct FaultPoints {
    names: &'static [&'static str],
    /// The points that were reached or armed.
    points: Mutex<BTreeMap<&'static str, FaultPointState>>,
    disarmed: Condvar,
}

impl FaultPoints {
    /// Returns points of these names, not armed.
    #[must_use]
    pub const fn new(names: &'static [&'static str]) -> Self {
        Self { names, points: Mutex::new(BTreeMap::new()), disarmed: Condvar::new() }
    }

    /// Reaches a point. Blocks while it is armed with [`Fault::Hold`].
    ///
    /// # Panics
    /// If the point is not declared: a test that arms all points would miss it.
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
        let is_held =
            |points: &mut BTreeMap<_, FaultPointState>| points[name].armed == Some(Fault::Hold);
        let mut points =
            self.disarmed.wait_while(points, is_held).unwrap_or_else(PoisonError::into_inner);
        points.entry(name).or_default().waiting -= 1;
    }

    /// Reaches a point from asynchronous code, as [`reach`](Self::reach).
    pub async fn reach_async(&'static self, name: &'static str) {
        // `reach` panics only for an undeclared name.
        tokio::task::spawn_blocking(move || self.reach(name))
            .await
            .expect("the fault point is declared");
    }

    /// Arms a point with `fault`. Waiting threads continue if it is not [`Fault::Hold`].
    ///
    /// # Errors
    /// The point is not declared.
    pub fn arm(&self, name: &str, fault: Fault) -> Result<(), UndeclaredPoint> {
        self.set(name, Some(fault))
    }

    /// Disarms a point. Waiting threads continue.
    ///
    /// # Errors
    /// The point is not declared.
    pub fn disarm(&self, name: &str) -> Result<(), UndeclaredPoint> {
        self.set(name, None)
    }

    /// Returns all declared points.
    #[must_use]
    pub fn all(&self) -> BTreeMap<&'static str, FaultPointState> {
        let points = self.lock();
        self.names
            .iter()
            .map(|name| (*name, points.get(name).copied().unwrap_or_default()))
            .collect()
    }

    fn set(&self, name: &str, fault: Option<Fault>) -> Result<(), UndeclaredPoint> {
        let declared = self.names.iter().find(|declared| **declared == name);
        let declared = declared.ok_or_else(|| UndeclaredPoint(name.to_owned()))?;
        self.lock().entry(declared).or_default().armed = fault;
        self.disarmed.notify_all();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, FaultPointState>> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kills this process as `kill -9`: nothing is flushed, nothing is dropped.
fn kill_this_process() -> ! {
    // The kernel does not let process 1 of a container kill itself. `abort` ends it as abruptly.
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort()
}
