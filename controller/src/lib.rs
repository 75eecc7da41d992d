//! The allocating controller: the one writer of allocations of our devices.
//!
//! ```text
//!  API server --watch--> watch ---Change---> planner --Task--> commit ----PATCH status---> API server
//!                                             | owns Index        |
//!                                             |<-----Outcome------'
//!                                             '--Notice--> notices ---events---> API server
//!  leadership: Lease; the planner only exists while this process leads, and the process ends when it no longer does
//! ```
//!
//! The [`planner`] owns all state: it applies every change to the index, plans when something
//! changed (never by a timer), and hands writes to tasks that report back over a channel. A
//! decision counts as taken from the moment it is made. A plan has a budget of steps: when they are
//! spent, what was decided is written, and the next plan goes on. Planner and Lease have threads of
//! their own (see [`lead`]).
//!
//! | task | thread | owns | talks to |
//! |---|---|---|---|
//! | `watch`, one per kind | runtime | the keys it has seen | planner |
//! | `planner` | its own | `Index`, `Retries`, `Repairs`, what has been told to whom | `commit`, `notices` |
//! | `commit`, one per claim being written | runtime | one claim object | planner |
//! | `notices` | runtime | nothing | API server |
//! | `leadership` | its own | the Lease | everybody, by ending the process |

#![forbid(unsafe_code)]

pub mod commit;
pub mod core;
pub mod lead;
pub mod leadership;
pub mod metrics;
pub mod reasons;
pub mod shell;
pub mod watch;

mod args;
mod executor;
#[cfg(feature = "fault-points")]
pub mod fault;
#[cfg(not(feature = "fault-points"))]
mod fault;
mod run;
mod server;

pub use args::Args;
