//! NVIDIA's driver libraries in this process: where they are loaded, and calls of their own
//! functions, never of the hooks.

pub(crate) mod cuda;
mod elf;
pub(crate) mod events;
mod function;
pub(crate) mod nvml;

pub(crate) use elf::{LoadedLibrary, PROXY_MARK};
pub(crate) use function::{Function, absent};
