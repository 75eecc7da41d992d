//! Compiles the protos with protox, so that `protoc` is not needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTOS: [&str; 5] = [
        "registration.proto",
        "dra_v1.proto",
        "dra_v1beta1.proto",
        "health_v1.proto",
        "health_v1alpha1.proto",
    ];

    for proto in PROTOS {
        println!("cargo::rerun-if-changed=proto/{proto}");
        // Compiled separately: the packages `v1` and `k8s.io…v1` would conflict in one descriptor
        // set.
        let descriptors = protox::compile([proto], ["proto"])?;
        tonic_prost_build::configure().compile_fds(descriptors)?;
    }
    Ok(())
}
