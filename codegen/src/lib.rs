//! Artifacts from verified schedules and modules: CUDA/NCCL programs, PyTorch modules, JSON, pictures.
//!
//! Everything here is text made from data: no file is written, no tool is looked for, and the same schedule always
//! gives the same bytes.
//!
//! Architecture invariant: this crate depends on `ir` alone; device code reaches it as text.
//!
//! ```
//! use ithaca_codegen::svg;
//!
//! let source = r#"
//! ithaca 1 program
//! model "a sum"
//! dim s = 8
//!
//! func @main() {
//!   %x = input {name="x"} : f32[s]
//!   %y = add %x, %x : f32[s]
//!   return y = %y
//! }
//! "#;
//! let module = ithaca_ir::text::parse(source).expect("the text is well formed");
//! assert!(svg::emit(&module).starts_with("<svg "));
//! ```

pub mod codes;
pub mod cuda;
pub mod dot;
pub mod json;
pub mod mermaid;
pub mod report;
pub mod svg;
pub mod torch;
pub mod trace;

/// The refusal of dropout by a stream of random numbers, which is the order of one device.
fn dropout_of_a_device() -> ithaca_ir::Diagnostic {
    let message = "dropout of an emitted attention is keyed by the order in which a device computes: the ranks would drop other \
                   weights than one device does, and backward other ones than forward";
    ithaca_ir::Diagnostic::new("S42", message).help("key it by position: dropout=uniform(…, keyed=position)")
}
