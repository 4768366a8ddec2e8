//! Compiles the schema once more, as the views' second opinion: Rust types into `OUT_DIR`.
use std::error::Error;

const SCHEMA: &str = "../../proto";
const FILES: [&str; 2] = ["iop/runtime.proto", "iop/transport.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={SCHEMA}/iop");
    let mut compiler = protox::Compiler::new([SCHEMA])?;
    compiler.open_files(FILES)?;
    prost_build::Config::new()
        .btree_map(["."])
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
