//! Tests of the C interface: every CUDA symbol exists, and none crashes.

mod driver;

use driver::{Driver, SUCCESS, out};
use tessera_fake_world::shipped;
use tessera_intercept_symbols::{Library, RELEASES, SymbolVersion, TABLE};

const INVALID_VALUE: u32 = 1;
const NOT_INITIALIZED: u32 = 3;
const NO_DEVICE: u32 = 100;
const NOT_FOUND: u32 = 500;
const NOT_SUPPORTED: u32 = 801;

/// Returns the exports of a driver of this version.
fn symbols(driver: SymbolVersion) -> impl Iterator<Item = &'static str> {
    let cuda = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
    cuda.filter(move |symbol| symbol.is_exported_by(driver)).map(|symbol| symbol.symbol.text)
}

/// Returns a world with a driver of this version.
fn world_of(driver: SymbolVersion) -> String {
    let default = "cuda: \"13.0\"";
    let world = shipped::H100_8_NVSWITCH;
    assert!(world.contains(default), "the world has another version");
    world.replace(default, &format!("cuda: \"{driver}\""))
}

#[test]
fn every_symbol_accepts_null_arguments() {
    let newest = *RELEASES.last().expect("there are some");
    let driver = Driver::load(&world_of(newest));
    let known = |result| result < 1000;
    for symbol in symbols(newest) {
        assert!(known(driver.call(symbol, [])), "{symbol} before cuInit");
    }
    driver.ok("cuInit", [0]);
    for symbol in symbols(newest) {
        driver.context(0);
        assert!(known(driver.call(symbol, [])), "{symbol}");
    }
}

#[test]
fn functions_newer_than_driver_are_not_found() {
    for version in [SymbolVersion(11_040), SymbolVersion(12_090), SymbolVersion(13_050)] {
        let driver = Driver::load(&world_of(version));
        let found = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
        let found: Vec<_> =
            found.map(|symbol| symbol.symbol.text).filter(|name| driver.has(name)).collect();
        assert!(symbols(version).eq(found), "CUDA {version}");
        assert!(driver.has("cuFunctionOfTomorrow"), "in no table");
    }
}

#[test]
fn only_version_works_before_initialisation() {
    let driver = Driver::load(shipped::H100_8_NVSWITCH);
    let mut number = 0_i32;
    assert_eq!(driver.call("cuDeviceGetCount", [out(&mut number)]), NOT_INITIALIZED);
    assert_eq!(driver.call("cuGraphClone", []), NOT_INITIALIZED, "stubs too");
    driver.ok("cuDriverGetVersion", [out(&mut number)]);
    assert_eq!(number, 13_000);
    driver.ok("cuInit", [0]);
    assert_eq!(driver.call("cuGraphClone", []), NOT_SUPPORTED);
    assert_eq!(driver.call("cuInit", [1]), INVALID_VALUE);
}

#[test]
fn node_without_gpus_has_no_device() {
    let driver = Driver::load("driver: {version: 580.95.05, cuda: \"13.0\"}\ngpus: []\n");
    assert_eq!(driver.call("cuInit", [0]), NO_DEVICE);
}

#[test]
fn export_tables_are_not_found() {
    let driver = Driver::begin(shipped::T4_1);
    let mut table = 1_usize;
    let id = [0_u8; 16];
    assert_eq!(driver.call("cuGetExportTable", [out(&mut table), id.as_ptr() as usize]), NOT_FOUND);
    assert_eq!(table, 0);
}

#[test]
fn errors_have_names() {
    let driver = Driver::load(shipped::T4_1);
    let mut text = std::ptr::null::<std::ffi::c_char>();
    driver.ok("cuGetErrorName", [2, out(&mut text)]);
    // SAFETY: the driver returned a terminated static string.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(driver.call("cuGetErrorName", [12_345, out(&mut text)]), INVALID_VALUE);
    assert_eq!(SUCCESS, driver.call("cuGetErrorString", [0, out(&mut text)]));
}
