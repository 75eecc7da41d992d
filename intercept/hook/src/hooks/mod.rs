//! Hooks: a Rust function in the place of each driver function that allocates, launches, waits, or
//! reports. This module alone lists them.

mod array;
mod bind;
mod capture;
mod context;
mod graph;
mod import;
mod info;
mod launch;
mod limit;
mod memory;
mod module;
mod nvml;
mod physical;
mod pool;
mod processes;
mod resolve;
mod route;
mod utilization;
mod wait;

pub(crate) use route::{Hook, Route};

/// Returns all routes.
pub(crate) fn all() -> impl Iterator<Item = &'static Route> {
    let groups: [&'static [&'static Route]; 18] = [
        memory::ROUTES,
        pool::ROUTES,
        physical::ROUTES,
        array::ROUTES,
        bind::ROUTES,
        import::ROUTES,
        module::ROUTES,
        graph::ROUTES,
        context::ROUTES,
        info::ROUTES,
        limit::ROUTES,
        wait::ROUTES,
        launch::ROUTES,
        nvml::ROUTES,
        capture::ROUTES,
        processes::ROUTES,
        utilization::ROUTES,
        resolve::ROUTES,
    ];
    groups.into_iter().flatten().copied()
}

/// All hooks, by the names of their functions: a library exports them.
#[doc(hidden)]
pub mod entries {
    pub use super::array::entries::*;
    pub use super::bind::entries::*;
    pub use super::capture::entries::*;
    pub use super::context::entries::*;
    pub use super::graph::entries::*;
    pub use super::import::entries::*;
    pub use super::info::entries::*;
    pub use super::launch::entries::*;
    pub use super::limit::entries::*;
    pub use super::memory::entries::*;
    pub use super::module::entries::*;
    pub use super::nvml::entries::*;
    pub use super::physical::entries::*;
    pub use super::pool::entries::*;
    pub use super::processes::entries::*;
    pub use super::resolve::entries::*;
    pub use super::utilization::entries::*;
    pub use super::wait::entries::*;
}
