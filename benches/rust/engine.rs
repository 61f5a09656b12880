//! The engine from Rust: what the Python numbers stand on.

fn main() {
    divan::main();
}
