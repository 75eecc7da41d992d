//! `cuGetProcAddress`.

use std::ffi::{c_char, c_int, c_void};

use tessera_intercept_symbols::{Missing, Symbol, Version, resolve};

use crate::abi::{Answer, In, Out, export};
use crate::status::Status;
use crate::symbols::ADDRESSES;
use crate::{driver, exports};

/// `CUdriverProcAddressQueryResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Yes = 0,
    NoSuchName = 1,
    TooNew = 2,
}

impl From<Missing> for Found {
    fn from(why: Missing) -> Self {
        match why {
            Missing::NoSuchName => Self::NoSuchName,
            Missing::TooNew => Self::TooNew,
        }
    }
}

/// A CUDA version of the boundary; there is none below 0.
fn version(number: c_int) -> Version {
    Version(number.try_into().unwrap_or(0))
}

/// Where a function is.
fn address(symbol: &Symbol) -> *const c_void {
    let at = ADDRESSES.binary_search_by_key(&symbol.symbol.text, |(name, _)| name);
    ADDRESSES[at.expect("invariant: written from the same table")].1 as *const c_void
}

fn get(
    name: In<c_char>,
    function: Out<*const c_void>,
    asked: c_int,
    flags: u64,
) -> Answer<Result<(), Found>> {
    function.check()?;
    let driver = version(driver::cuda_number()?);
    if name.text()? == exports::OF_TOMORROW {
        return function.set(exports::of_tomorrow as *const c_void).map(Ok);
    }
    match resolve(name.text()?, version(asked), flags, driver) {
        Ok(symbol) => function.set(address(symbol)).map(Ok),
        Err(why) => function.set(std::ptr::null()).map(|()| Err(why.into())),
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
