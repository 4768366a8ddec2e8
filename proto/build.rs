//! Compiles `iop/*.proto` without protoc: Rust types and the descriptor set, both into `OUT_DIR`.
use std::error::Error;
use std::path::PathBuf;

const FILES: [&str; 3] = [
    "iop/runtime.proto",
    "iop/transport.proto",
    "iop/lease.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=iop");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let mut compiler = protox::Compiler::new(["."])?;
    // Without comments and positions: the digest changes when the schema changes, and only then.
    compiler.include_source_info(false).open_files(FILES)?;
    std::fs::write(
        out.join("descriptor.bin"),
        compiler.encode_file_descriptor_set(),
    )?;
    prost_build::Config::new()
        .out_dir(out)
        .bytes(["."])
        .btree_map(["."])
        // Each may hold a secret.
        .skip_debug([
            "iop.RegisterRequest",
            "iop.ProviderTunnelRequest",
            "iop.lease.LeaseEnvelope",
        ])
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
