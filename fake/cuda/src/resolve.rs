//! `cuGetProcAddress`.

use std::ffi::{c_char, c_int, c_void};

use crate::abi::{Answer, In, Out, export};
use crate::driver;
use crate::status::Status;
use crate::symbols::TABLE;

/// A form of a function.
pub(crate) struct Entry {
    /// Its name without version and variant.
    pub(crate) base: &'static str,
    /// The CUDA version that brought it.
    pub(crate) version: c_int,
    /// For the per-thread default stream.
    pub(crate) per_thread: bool,
    /// It.
    pub(crate) function: unsafe extern "C" fn(),
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;

/// `CUdriverProcAddressQueryResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Yes = 0,
    NoSuchName = 1,
    TooNew = 2,
}

/// The form of a function that a program built for that CUDA version expects; the one for the per-thread default stream
/// where flags ask for it and there is one. The empty name is `cuGetProcAddress` itself.
fn find(name: &str, version: c_int, flags: u64, driver: c_int) -> Result<*const c_void, Found> {
    let (name, version) = if name.is_empty() { ("cuGetProcAddress", driver) } else { (name, version) };
    let known = || TABLE.iter().filter(|entry| entry.base == name && entry.version <= driver);
    if known().next().is_none() {
        return Err(Found::NoSuchName);
    }
    let newest = |per_thread: bool| {
        let fitting = known().filter(|entry| entry.per_thread == per_thread && entry.version <= version);
        fitting.max_by_key(|entry| entry.version)
    };
    let special = if flags & PER_THREAD != 0 { newest(true) } else { None };
    special.or_else(|| newest(false)).map(|entry| entry.function as *const c_void).ok_or(Found::TooNew)
}

fn get(
    name: In<c_char>,
    function: Out<*const c_void>,
    version: c_int,
    flags: u64,
) -> Answer<Result<(), Found>> {
    function.check()?;
    let driver = driver::cuda_number()?;
    match find(name.text()?, version, flags, driver) {
        Ok(address) => function.set(address).map(Ok),
        Err(found) => function.set(std::ptr::null()).map(|()| Err(found)),
    }
}

export! {
    fn cuGetProcAddress(name: In<c_char>, function: Out<*const c_void>, version: c_int, flags: u64) {
        get(name, function, version, flags)?.map_err(|_| Status::NotFound)
    }

    fn cuGetProcAddress_v2(
        name: In<c_char>,
        function: Out<*const c_void>,
        version: c_int,
        flags: u64,
        found: Out<c_int>,
    ) {
        // Since CUDA 12, what is not found is no error: the status tells, and the NULL.
        let outcome = get(name, function, version, flags)?.err().unwrap_or(Found::Yes);
        found.set_if_wanted(outcome as c_int);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
