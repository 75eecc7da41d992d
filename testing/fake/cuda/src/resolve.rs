//! `cuGetProcAddress`.

use std::ffi::{c_char, c_int, c_void};

use tessera_intercept_symbols::{Missing, Symbol, SymbolVersion, resolve};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::status::Status;
use crate::symbols::ADDRESSES;
use crate::{driver, exports};

/// `CUdriverProcAddressQueryResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueryResult {
    Yes = 0,
    NoSuchName = 1,
    TooNew = 2,
}

impl From<Missing> for QueryResult {
    fn from(missing: Missing) -> Self {
        match missing {
            Missing::NoSuchName => Self::NoSuchName,
            Missing::TooNew => Self::TooNew,
        }
    }
}

/// Returns the CUDA version of a number; negative numbers are version 0.
fn version(number: c_int) -> SymbolVersion {
    SymbolVersion(number.try_into().unwrap_or(0))
}

/// Returns the address of a function.
fn address(symbol: &Symbol) -> *const c_void {
    let at = ADDRESSES.binary_search_by_key(&symbol.symbol.text, |(name, _)| name);
    ADDRESSES[at.expect("invariant: written from the same table")].1 as *const c_void
}

fn get(
    name: InPtr<c_char>,
    function: OutPtr<*const c_void>,
    requested: c_int,
    flags: u64,
) -> CuResult<Result<(), QueryResult>> {
    function.check()?;
    let driver = version(driver::cuda_number()?);
    let is_future_form = driver.min(version(requested)) >= exports::FUTURE_RELEASE;
    if is_future_form || name.text()? == exports::UNLISTED_FUNCTION {
        return function.set(exports::unlisted_function as *const c_void).map(Ok);
    }
    match resolve(name.text()?, version(requested), flags, driver) {
        Ok(symbol) => function.set(address(symbol)).map(Ok),
        Err(missing) => function.set(std::ptr::null()).map(|()| Err(missing.into())),
    }
}

export! {
    fn cuGetProcAddress(name: InPtr<c_char>, function: OutPtr<*const c_void>, version: c_int, flags: u64) {
        get(name, function, version, flags)?.map_err(|_| Status::NotFound)
    }

    fn cuGetProcAddress_v2(
        name: InPtr<c_char>,
        function: OutPtr<*const c_void>,
        version: c_int,
        flags: u64,
        found: OutPtr<c_int>,
    ) {
        // Since CUDA 12 an unknown function is not an error: the status and a NULL pointer report
        // it.
        let outcome = get(name, function, version, flags)?.err().unwrap_or(QueryResult::Yes);
        found.set_unless_null(outcome as c_int);
        Ok(())
    }
}
