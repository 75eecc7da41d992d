use super::*;

/// The symbol that a query resolves to.
fn symbol(name: &str, version: c_int, flags: u64, driver: c_int) -> Result<&'static str, Found> {
    let address = find(name, version, flags, driver)?;
    let row =
        TABLE.iter().position(|entry| entry.function as *const c_void == address).expect("in the table");
    let line = SYMBOLS.lines().filter(|line| !line.starts_with('#')).nth(row).expect("as many rows");
    Ok(line.rsplit(' ').next().expect("a field"))
}

const SYMBOLS: &str = include_str!("../symbols.txt");

#[test]
fn programs_get_the_form_they_were_built_for() {
    assert_eq!(symbol("cuMemAlloc", 2000, 0, 12090), Ok("cuMemAlloc"));
    assert_eq!(symbol("cuMemAlloc", 12090, 0, 12090), Ok("cuMemAlloc_v2"));
    assert_eq!(symbol("cuCtxCreate", 12040, 0, 12090), Ok("cuCtxCreate_v3"));
    assert_eq!(symbol("cuMemcpyHtoD", 7000, 2, 12090), Ok("cuMemcpyHtoD_v2_ptds"));
    assert_eq!(symbol("cuStreamGetCaptureInfo", 12030, 2, 12090), Ok("cuStreamGetCaptureInfo_v3_ptsz"));
    assert_eq!(symbol("", 0, 0, 12090), Ok("cuGetProcAddress_v2"));
    assert_eq!(symbol("cuDeviceGet", 12000, 2, 12090), Ok("cuDeviceGet"), "no per-thread form");
}

#[test]
fn what_is_too_new_or_unknown_is_told_apart() {
    assert_eq!(symbol("cuMemAllocAsync", 11000, 0, 12090), Err(Found::TooNew));
    assert_eq!(symbol("cuNoSuchThing", 12090, 0, 12090), Err(Found::NoSuchName));
    assert_eq!(
        symbol("cuGraphAddNode", 12030, 0, 11040),
        Err(Found::NoSuchName),
        "an older driver has it not"
    );
    assert_eq!(symbol("cuCtxCreate", 12090, 0, 11000), Ok("cuCtxCreate_v2"));
}
