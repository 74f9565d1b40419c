//! Adjoints: that of dispatch is a combination, that of a combination is a dispatch.

use crate::builder::FunctionBuilder;
use crate::handles::ValueId;
use crate::ops::error::{OpError, bail};
use crate::ops::gradients::cast;
use crate::ops::table::experts::Experts;
use crate::ops::table::op::Op;

impl Experts {
    /// The gradients of the operands from those of the results; choices and the bias of a route have none.
    ///
    /// # Errors
    /// `V32` where a gradient reaches the gradient of a route.
    pub fn adjoint(
        &self,
        b: &mut FunctionBuilder<'_>,
        operands: &[ValueId],
        results: &[ValueId],
        gradients: &[Option<ValueId>],
    ) -> Result<Vec<Option<ValueId>>, OpError> {
        let mut out = vec![None; operands.len()];
        let Some(d) = gradients[0] else { return Ok(out) };
        let places = operands[0];
        match self {
            Experts::Route(route) => {
                let op = Op::Experts(Experts::RouteBackward(route.clone()));
                out[0] = Some(b.push(op, &[operands[0], results[1], d])?);
            }
            Experts::RouteBackward(_) => {
                bail!("V32", "a gradient reaches `route_backward`, which has no adjoint");
            }
            Experts::Deal(_) => bail!("V32", "a gradient reaches `deal`, whose result is integers"),
            Experts::Dispatch(slots) | Experts::Combine(slots) => {
                let (back, [filled, tokens]) = match self {
                    Experts::Dispatch(_) => (Experts::Combine(*slots), [d, operands[1]]),
                    _ => (Experts::Dispatch(*slots), [operands[1], d]),
                };
                let mut of_back = vec![places, d];
                of_back.extend(operands.get(2));
                out[1] = Some(b.push(Op::Experts(back), &of_back)?);
                if let Some(&gates) = operands.get(2) {
                    let products = Op::Experts(Experts::Products(*slots));
                    let products = b.push(products, &[places, filled, tokens])?;
                    out[2] = Some(cast(b, products, b.ty(gates).dtype)?);
                }
            }
            Experts::Products(slots) => {
                // Each product is linear in the slot and in the token.
                let d = cast(b, d, b.ty(operands[1]).dtype)?;
                let to_slots = Op::Experts(Experts::Dispatch(*slots));
                out[1] = Some(b.push(to_slots, &[places, operands[2], d])?);
                out[2] = Some(b.push(Op::Experts(Experts::Combine(*slots)), &[places, operands[1], d])?);
            }
        }
        Ok(out)
    }
}
