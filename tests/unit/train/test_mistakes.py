"""Common mistakes, each answered with the cause and a remedy, never with a bare Python error."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

import amp_rewrite
import amp_rewrite.train as T
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.train.loss_scale import IndexedSlices
from amp_rewrite.train.replicas import SingleReplica
from support.train.nets import fresh_process, parsed

__all__ = ["fresh_process"]
pytestmark = pytest.mark.usefixtures("fresh_process")

F32 = np.float32
MODEL = parsed(
    "g (float[N,3] x) => (float[N,2] y) <float[3,2] w = {1,-2,3,1,-1,2}, float[2] b = {0,0}>"
    " { h = MatMul (x, w) z = Add (h, b) y = Softmax (z) }"
)
TWO = parsed(
    "g (float[N,2] a, float[N,2] c) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> { s = Add (a, c) y = MatMul (s, w) }"
)
BARE = parsed("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
HALF_LOSS = parsed(
    "g (float16[3] x) => (float16 loss) <float16[3] w = {1, 2, 3}>"
    " { p = Mul (x, w) loss = ReduceMean <keepdims = 0> (p) }"
)
X, Y = np.random.default_rng(0).normal(size=(40, 3)).astype(F32), np.arange(40) % 2
SPARSE, CROSS = "sparse_categorical_crossentropy", "cross_entropy(y, label)"


def network(loss: Any = SPARSE, optimizer: Any = "sgd", **options: Any) -> T.Network:
    made = T.Network(MODEL, policy="float32")
    made.compile(optimizer, loss, **options)
    return made


def step(**options: Any) -> T.TrainingStep:
    return T.training_step(MODEL, **{"loss": CROSS, "policy": "float32", **options})


def trainer() -> T.Trainer:
    return T.Trainer(step())


def gradients_of(sources: Any) -> Any:
    return T.GradientTape().gradient(T.Losses.SparseCategoricalCrossentropy()(Y, network()(X)), sources)


def optimizer() -> T.StatefulOptimizer:
    return T.StatefulOptimizer(T.SGD(0.1))


def restored(rule: Any) -> T.StatefulOptimizer:
    """An optimizer with a slot of another shape."""
    made = T.StatefulOptimizer(rule)
    made.restore({"step": np.array(1), "slot/w/momentum": np.zeros(3)})
    return made


def scaled(scale: Any) -> T.LossScaleOptimizer:
    return T.LossScaleOptimizer(T.SGD(0.1), scale)


def half() -> onnx.ModelProto:
    low = onnx.ModelProto()
    low.CopyFrom(MODEL)
    for tensor in low.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    for formal in (*low.graph.input, *low.graph.output):
        formal.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return low


def other_checkpoint() -> str:
    T.Trainer(T.training_step(TWO, loss="mean_squared_error(y, t)", policy="float32")).save("other.npz")
    return "other.npz"


ROW_2 = "IndexedSlices(np.ones(2, F32), np.array([0, 2]))"
SGD = {"class_name": "SGD", "config": {}}

MISTAKES = {
    # losses
    "network('sparse_categorical_crosentropy')": "or use cross_entropy(…)",
    "network(None)": "the loss must be a string, not None; use the name of a value, or a formula such as cross",
    "network(lambda y, p: 0)": "the loss must be a loss object of `Losses` or a name, not <function",
    "step(loss='cross_entropy(probs, label)')": "the model has no value 'probs'; its outputs are 'y'",
    "step(loss='cross_entropy(y, label, weight=[1, 2])')": "has no option 'weight'; ",
    "step(loss='cross_entropy(y, label, class_weights=[1])')": "must be a list of 2 numbers, one per class",
    "step(loss='huber(y, label, delta=1, delta=2)')": "huber sets delta twice; set it once",
    "T.Losses.SparseCategoricalCrossentropy(logits=True)": "no option 'logits'; did you mean 'from_logits'?",
    "T.Losses.MeanSquaredError(reduction='sum')": "for a sum, multiply the loss (a mean) by the",
    "T.Losses.CrossEntropy()": "use SparseCategoricalCrossentropy for class indices",
    "T.Losses.MeanSquaredError()(Y, X)": "ndarray is not a result of a Network; pass (y, network(inputs))",
    "float(T.Losses.SparseCategoricalCrossentropy()(Y[:5], network()(X)))": "'N' has size 40 in 'x' but 5 in 'y_true'",
    # optimizers
    "network(optimizer='adamm')": "unknown optimizer 'adamm'; use one of sgd, rmsprop, adam, adamw, adagrad",
    "network(optimizer=T.SGD)": "pass an Optimizer such as SGD(0.1), or its name",
    "T.SGD(lr=0.1)": "SGD does not take 'lr'; use learning_rate",
    "T.Adam(betas=(0.9, 0.999))": "Adam does not take 'betas'; use beta_1 and beta_2",
    "T.Adam(beta1=0.9)": "Adam does not take 'beta1'; use beta_1",
    "T.SGD(0.1, momentum=9)": "momentum of SGD must be at least 0 and at most 1 and finite, not 9",
    "T.SGD(0.1).minimize(None)": "because it has no state; use StatefulOptimizer(SGD(…))",
    "scaled('static')": "loss_scale must be None, 'dynamic', a finite number ≥ 1 or a LossScale, not 'static'",
    "T.LossScaleOptimizer(T.SGD(0.1), dynamic=True)": "LossScaleOptimizer does not take 'dynamic'; it takes optimizer",
    "optimizer().step()": "use apply_gradients(zip(gradients, variables)) or minimize(loss)",
    "optimizer().zero_grad()": "omit it, since gradients are returned",
    "optimizer().minimize(3.0)": "3.0 does not list its variables; pass var_list, or use a ModelLoss",
    "optimizer().apply_gradients([X])": "must be pairs of (gradient, variable); pass zip(gradients, variables)",
    "optimizer().apply_gradients([(T.Variable(1.0), 1.0)])": "float is not a Variable; pass Variables",
    "optimizer().apply_gradients([('a', T.Variable(1.0))])": "a gradient must be an array of numbers, not 'a'",
    "setattr(optimizer(), 'learning_rte', 3)": "SGD has no hyperparameter 'learning_rte'; it has",
    "T.CosineDecay(0.1)": "'decay_steps'; call CosineDecay(initial_learning_rate, decay_steps, alpha=0.0)",
    # metrics, callbacks and compile
    "network(metrics=['acuracy'])": "fit does not compute 'acuracy'; use 'accuracy'",
    "network('mse', metrics=['accuracy'])": "has no accuracy; omit metrics",
    "network(run_eagerly=True)": "Network.compile does not take 'run_eagerly'; omit it",
    "network(loss_weights=[1.0])": "compute the sum of losses in the model, and name that value",
    "T.Metrics.AUC()": "compute it from predict(x)",
    "T.Metrics.Mean().update_state('a')": "the value of 'mean' must be an array of numbers, not 'a'",
    "network().fit(X, Y, callbacks=[T.EarlyStopping])": "pass EarlyStopping(…), or a function",
    "network().fit(X, Y, callbacks=[T.EarlyStopping()])": "pass validation_data or validation_split",
    "T.EarlyStopping('val_loss', patience='3')": "patience must be a whole number ≥ 0, not '3'",
    # data
    "T.Network(MODEL).fit(X, Y)": "the network has no loss or optimizer for fit and evaluate; call compile first",
    "network().fit()": "fit needs data; pass them first, as in fit(x, y)",
    "network().fit(X)": "the targets 'y_true' are missing; pass them after the inputs, as in fit(x, y)",
    "network().fit(X, Y[:10])": "different numbers of rows (x 40, y_true 10); pass arrays of equal length",
    "network().fit(X, Y * 0 + 0.5)": "'y_true' contain 0.5, but class indices must be whole numbers; round",
    "network().fit(X, Y + 4)": "but the model has classes 0 to 1; correct the targets",
    "network().fit(X, np.eye(2, dtype=F32)[Y])": "use categorical_crossentropy (categorical_cross_entropy), or pass",
    "network('categorical_crossentropy').fit(X, Y)": "use sparse_categorical_crossentropy (cross_entropy), or pass",
    "network('mse').fit(X, Y)": "input 'y_true' of batch 0 has the shape [32], but the input takes [N, 2]",
    "network().fit(X, [str(y) for y in Y])": "input 'y_true' of batch 0 is <U1, but the input takes int64; cast it",
    "network().fit(X.astype(int), Y)": "is int64, but the input takes float32; cast it with .astype('float32')",
    "network().fit(X[0], Y[0])": "input 'x' of batch 0 has the shape [3], but the input takes [N, 3]",
    "network().fit({'x': X}, {'label': Y})": "has an array 'label', but the model has the inputs 'x', 'y_true'",
    "network().fit('data.csv')": "there is no such file; name a .npz file",
    "network().fit(X, Y, batch_size='32')": "batch_size must be a whole number ≥ 1, not '32'",
    "network().fit(X, Y, nb_epoch=3)": "Network.fit does not take 'nb_epoch'; use epochs",
    "network().fit(X, Y, class_weight={0: 1.0})": "pass class_weights=[…] to the loss",
    "network().fit(X, Y, sample_weight=np.ones(40))": "pass sample_weight=NAME to the loss",
    "network().fit(X, Y, validation_split=20)": "validation_split must be a number above 0 and below 1, not 20",
    "network().fit(X, Y, validation_data=X)": "the targets 'y_true' are missing",
    "network().fit(X, Y, shuffle='batch')": "shuffle must be True or False, not 'batch'",
    "network()(None)": "the input",
    "network()({'image': X})": "the batch is missing the inputs ['x']; pass arrays for all inputs of the model",
    "T.Network(TWO)(X)": "the model has the inputs a, c; pass a mapping with all of them",
    "trainer().fit([])": "the data contains no batches; give at least one",
    "trainer().fit([{'x': X}])": "batch 0 is missing input 'label'; every batch needs 'x', 'label'",
    "trainer().fit([{'x': X, 'label': Y}], batch_size=8)": "these data are already batches",
    # weights and files
    "network().set_weights([X])": "set_weights takes 2 arrays, in this order: w, b",
    "network().set_weights([np.full((3, 2), 'a'), X[0, :2]])": "the value of variable 'w' must be an array",
    "network().load('nothing.npz')": "there is no such file",
    "network().save('model.onnx')": "use a file name ending in .npz",
    "network().load(other_checkpoint())": "is a checkpoint of another model",
    "network().state_dict()": "get_weights() and checkpoint() return the values",
    "network().parameters()": "use trainable_variables, or get_weights()",
    "trainer().set_weights({'v': X})": "weight 'v' of the step is not trained; pass the result of get_weights",
    "trainer().set_state({})": "the state is missing 'w'",
    # tapes
    "T.GradientTape().gradient(3.0, [T.Variable(1.0)])": "3.0 has no gradients; use a ModelLoss",
    "gradients_of(['w'])": "str is not a Variable; pass Variables",
    "T.GradientTape().watch(X)": "omit it, since a tape watches all variables",
    "network().loss(CROSS).on(3)": "batch of ModelLoss.on must be a mapping, not 3",
    "network().loss(CROSS)()": "the batch is missing the inputs ['label', 'x']; pass a complete batch with",
    # models and steps
    "T.Network('missing.onnx')": "cannot read missing.onnx",
    "T.Network(MODEL, policy=3)": "policy must be 'mixed_float16', 'mixed_bfloat16', 'float32' or a Policy, not 3",
    "T.Network(MODEL, polcy='float32')": "Network does not take 'polcy'; did you mean 'policy'?",
    "T.Network(BARE).compile('sgd', 'mse')": "does not depend on any trainable float32 initializer, or all",
    "T.Network(half()).compile('sgd', SPARSE)": "in half precision, but trained weights must be float32",
    "step(parameters=3)": "parameters and freeze must be globs that match initializers, not 3",
    "T.training_step(MODEL)": "'loss'; call training_step(model, *, loss, optimizer='sgd', ",
    "T.training_step(MODEL, 'mse')": "training_step: too many positional arguments; call training_step(model, *, loss",
    "step(optimiser='sgd')": "does not take 'optimiser'; did you mean 'optimizer'?",
    "step(learning_rate=0.1)": "pass it to the optimizer, as in SGD(0.1)",
    "T.Trainer(MODEL)": "ModelProto is not a training step; pass training_step(model, loss=…)",
    "T.Trainer(step(), provider='CUDA')": "Trainer does not take 'provider'; use providers",
    "T.bind(MODEL, [X])": "values of bind must be a mapping",
    "step(loss='h')": "the loss 'h' has shape ['N', 2], but a loss must have one element; reduce it to its mean",
    "step(loss='hinge(y)')": "unknown loss 'hinge'; use one of cross_entropy, categorical_cross_entropy",
    "step(loss='cross_entropy(y, h)')": "the target 'h' is a value of the model, but not an input",
    "step(loss='cross_entropy(y, x)')": "the target 'x' is float32, not int64; use a new name",
    "step(loss='huber(y, x)')": "the target 'x' is an input of shape ['N', 3], but this loss needs ['N', 2]",
    "step(loss='cross_entropy(y, label, u)')": "is not a loss formula; write cross_entropy(PREDICTION, TARGET, ",
    "step(loss='cross_entropy(y, label, smoothing=0.1)')": "did you mean 'label_smoothing'?",
    "step(loss='cross_entropy(y, label, label_smoothing=1.5)')": "must be a number from 0 to less than 1, not 1.5",
    "step(loss='cross_entropy(y, label, sample_weight=0.5)')": "must be the name of an input, not 0.5",
    "step(loss='cross_entropy(y, label, axis=0)')": "runs over axis 1, but the loss has axis=0; pass the axis of the",
    "step(loss='huber(y, label, delta=big)')": "delta of huber must be a number, a list of numbers",
    "step(loss='huber(y, t) - 0.5 * mean_squared_error(y, t)')": "is not a loss formula; write huber(PREDICTION",
    "T.training_step(HALF_LOSS, loss='loss')": "is float16, but a training step needs a float32 loss; cast it",
    "T.Losses.Huber(1.0, 2.0)": "huber takes only delta by position; name the others",
    # scales and hyperparameters
    "T.FixedLossScale('8')": "the loss scale must be a number from 1 to 3.4e+38, not '8'",
    "T.FixedLossScale(0.5)": "the loss scale must be a number from 1 to 3.4e+38, not 0.5",
    "T.FixedLossScale(1e39)": "the loss scale must be a number from 1 to 3.4e+38, not 1e+39",
    "T.DynamicLossScale(0.5)": "the initial loss scale must be a number from 1 to 3.4e+38, not 0.5",
    "T.DynamicLossScale(2, 0)": "the increment period must be a number from 1 to",
    "T.DynamicLossScale(4, 1.5)": "the increment period must be a whole number of steps ≥ 1",
    "T.DynamicLossScale(backoff_factor=1)": "the backoff factor must be a number other than 1 from 1.18e-38 to 1",
    "T.DynamicLossScale(minimum=0)": "the minimum must be a number from 1.18e-38 to 1, not 0",
    "scaled({'class_name': 'FixedLossScale', 'config': {'value': 2}})": "FixedLossScale does not take 'value'; it",
    "scaled({'class_name': 'Scale'})": "{'class_name': 'Scale'} is not a serialized loss scale; pass the result of se",
    "T.DynamicLossScale(2, 1, 1.0)": "the multiplier must be a number other than 1 from 1 to 3.4e+38, not 1.0",
    "step(optimizer='sgd,lr=1e39')": "learning_rate of SGD must be at least 0 and finite, not 1e+39",
    "step(optimizer='sgd,clipnorm=1e-50')": "clipnorm of SGD must be more than 0 and finite, not 1e-50",
    "step(optimizer='sgd,momentum=1.5')": "momentum of SGD must be at least 0 and at most 1 and finite, not 1.5",
    "step(optimizer='sgd,nesterov=0.5')": "nesterov of SGD must be true or false, not 0.5",
    "step(optimizer='adam,lr=0.1,learning_rate=0.2')": "optimizer 'adam' sets learning_rate twice; set it once",
    "scaled(None)": "loss_scale is None; use 'dynamic', a number or a LossScale, or the optimizer without a wrapper",
    # optimizer objects
    "scaled(2).minimize((T.Variable(1.0),), lambda: 3.0)": "is not a Variable or a list of them; pass variables",
    "scaled(2).get_scaled_loss(None)": "the loss is None, which cannot be scaled",
    "setattr(scaled(2), 'iterations', -1)": "iterations must be a whole number ≥ 0, not -1",
    "optimizer().apply_gradients([(1.0, T.Variable(1.0)), (1.0, T.Variable(2.0))])": "give each a unique name",
    "optimizer().restore({})": "the checkpoint is missing the step count 'step'; pass the result of checkpoint()",
    # arguments of the wrong type, and unknown arguments
    "network().fit(X, Y, progress=3)": "progress of Trainer.fit must be a function or None, not 3",
    "network().compile('sgd', SPARSE, metrics=3)": "metrics of Network.compile must be a string or a list of strings",
    "network().export('a.onnx')": "Network.export: too many positional arguments; call Network.export()",
    "network().fit(X, Y).accuracy": "History has no 'accuracy'; it has epochs, history, losses",
    "T.Trainer(step(), providers=3)": "providers of Trainer must be a list of strings or None, not 3",
    "T.EarlyStopping(3)": "monitor of EarlyStopping must be a string, not 3",
    "T.GradientTape(3, 4)": "GradientTape: too many positional arguments; call GradientTape(persistent=False)",
    "T.Variable(None)": "the value of variable 'Variable' must be an array of numbers, not None",
    "T.Optimizer(0.1)": "Optimizer: too many positional arguments; call Optimizer(*, clipnorm=None, ",
    "T.CosineDecay(0.1, 10)('a')": "step of CosineDecay.__call__ must be a whole number, not 'a'",
    "scaled(2).get_unscaled_gradients(None)": "grads of LossScaleOptimizer.get_unscaled_gradients must be a list",
    "scaled(2).get_slot('w', 'momentum')": "var of LossScaleOptimizer.get_slot must be a Variable, not 'w'",
    "optimizer().restore(3)": "saved of StatefulOptimizer.restore must be a mapping, a string or a path, not 3",
    "T.DynamicLossScale(init_scale=2)": "does not take 'init_scale'; did you mean 'initial_loss_scale'?",
    "T.DynamicLossScale.of_grad_scaler(scale=2)": "does not take 'scale'; did you mean 'init_scale'?",
    "T.save_step(3, 'step.onnx')": "step of save_step must be a TrainingStep, not 3",
    "step(folder=3)": "folder of training_step must be a string, a path or None, not 3",
    # ragged arrays, and arrays without an input
    "network().fit([[1.0, 2.0, 3.0], [4.0]], [0, 1])": "has rows of different lengths: ",
    "network()([[1.0, 2.0, 3.0], [4.0]])": "has rows of different lengths: ",
    "trainer().fit([(X, Y, np.ones(40))])": "1 array after those for 'x', 'label' cannot be fed, because the",
    "T.DynamicLossScale().update('a')": "a gradient must be an array of numbers, not 'a'",
    "list(T.shard(3, 4))": "shard takes batches and replicas, not 3 and 4",
    "list(T.shard([X], ALONE))": "batch 0 must be a mapping from input names to arrays, not ",
    "step(training_mode='yes')": "training_mode must be True or False, not 'yes'",
    "T.Metrics.SparseCategoricalAccuracy().update_state([0, 1, 2], np.ones((2, 4)))": "has targets of shape (3,)",
    "T.Metrics.Mean().update_state([1.0, 2.0], sample_weight=[1.0] * 3)": "pass one weight for each row",
    # numbers of fit
    "network().fit(X, Y, epochs=-1)": "epochs must be a whole number ≥ 0, not -1",
    "network().fit(X, Y, epochs=True)": "epochs must be a whole number ≥ 0, not True",
    "network().fit(X, Y, validation_split=0.5, validation_data=[])": "but validation_data is set; omit one",
    "network().fit(X, Y, learning_rate=True)": "the learning rate of step 1 must be finite and ≥ 0, not True",
    "network()(X)['z']": "the model has no output 'z'; it has y",
    # steps
    "step(parameters=['x'])": "'x' matches no initializer of the model; the model has 'w', 'b'",
    "step(freeze='*')": "does not depend on any trainable float32 initializer, or all of them",
    "step(policy='float16')": "does not keep parameters and results in float32, as a training step must",
    "step(keep=['op=Relu'])": "policy 'float32' lowers nothing, so keep would have no effect; remove the options",
    "step(lower=['op=Sub'], policy='mixed_float16')": "which a training step computes in float32; narrow the pattern",
    # optimizers as text
    "step(optimizer='sgd,lr=fast')": "optimizer 'sgd': 'lr=fast' is not a setting; write NAME=NUMBER",
    "step(optimizer='sgd,momentum')": "optimizer 'sgd': 'momentum' is not a setting; write NAME=NUMBER",
    "step(optimizer='sgd,beta_1=0.5')": "SGD does not take 'beta_1'; it takes learning_rate, momentum, nesterov, ",
    "step(optimizer='adam,beta_1=1')": "beta_1 of Adam must be at least 0 and less than 1 and finite, not 1.0",
    "step(optimizer='sgd,lr=-1')": "learning_rate of SGD must be at least 0 and finite, not -1.0",
    "step(optimizer='sgd,lr=nan')": "learning_rate of SGD must be at least 0 and finite, not nan",
    "step(optimizer='sgd,clipnorm=0')": "clipnorm of SGD must be more than 0 and finite, not 0.0",
    "T.SGD(clipnorm=1, clipvalue=1)": "SGD clips gradients by clipnorm and by clipvalue; set only one",
    "optimizer().set_weights([])": "weights must have length 1, not 0; pass the result of get_weights()",
    "T.LossScaleOptimizer.from_config({'inner_optimizer': SGD, 'dynamic': False})": "a fixed loss scale needs initial_",
    f"optimizer().apply_gradients([({ROW_2}, T.Variable([1.0, 2.0]))])": "a sparse gradient has row 2, which is out",
    "restored(T.SGD(1.0, momentum=0.5)).apply_gradients([(np.ones(2), T.Variable([1.0, 2.0], 'w'))])": (
        "slot 'momentum' of variable 'w' has shape (3,), but the variable has (2,); restore a checkpoint of this"
    ),
    "T.Trainer(step(optimizer=restored(T.SGD(1.0, momentum=0.5))))": (
        "the optimizer's 'slot/w/momentum' has shape [3], but the step needs [3, 2]; pass an optimizer that trained"
    ),
    # schedules
    "T.CosineDecay(0.1, 0)": "decay_steps of CosineDecay must be a finite number of at least 1, not 0",
    "T.CosineDecay(-0.1, 5)": "initial_learning_rate of CosineDecay must be a finite number of at least 0",
    "T.CosineDecay('fast', 5)": "must be a finite number of at least 0, not 'fast'",
    "T.CosineDecay.from_config({'steps': 3})": "CosineDecay does not take 'steps'; did you mean 'decay_steps'?",
    "T.SGD({'class_name': 'Nothing', 'config': {}})": "pass the result of serialize() for one of CosineDecay, Exp",
    "network().fit(X, Y, learning_rate=float('nan'))": "the learning rate of step 1 must be finite and ≥ 0, not",
    "network().fit(X, Y, learning_rate=lambda step: 'fast')": "the learning rate of step 1 must be finite",
    # policies
    "A.Policy('mixed')": "unknown policy 'mixed'; use mixed_float16, mixed_bfloat16 or an element type such as float32",
    "A.Policy('mixed_float')": "unknown policy 'mixed_float'; did you mean 'mixed_float16'?",
    "A.Policy('float16_float32_vars')": "policy names no longer end in '_float32_vars'; use 'mixed_float16' ",
    "A.Policy.from_config({'name': 'float32', 'dtype': 'float16'})": "; it needs `name`, and may have `loss_scale`",
    "A.set_policy('int32')": "must compute in a floating-point type, but 'int32' does not; use mixed_float16, ",
    "A.set_policy('_infer')": "must compute in a floating-point type, but '_infer' does not; use mixed_float16, ",
    "A.convert(MODEL, to='float17')": "unknown type or policy 'float17'; did you mean 'float16'?",
    "A.convert(MODEL, to='mixed_int8')": "unknown type or policy 'mixed_int8'; did you mean 'mixed_float16'?",
    "A.convert(MODEL, to='float32')": "cannot lower to float32; use float16 or bfloat16",
    "A.convert(MODEL, to=A.Policy('float32'))": "policy 'float32' lowers nothing; use mixed_float16 or mixed_bfloat16",
    "A.convert(MODEL, to=A.Policy('float16'))": "keep results in float32; use mixed_float16, and io='low' for low in",
    # batches and targets
    "trainer().fit([{'x': X[:0], 'label': Y[:0]}])": "batch 0 has no elements: x [0, 3], label [0]; give at least one",
    "trainer().fit([{'x': X, 'label': Y, 'xx': X}])": "has an array 'xx', but the model has the inputs 'x', 'label'",
    "trainer().fit([{'x': X, 'label': Y - 1}])": "batch 0 has class -1, but the model has classes 0 to 1; correct",
    "network('kl_divergence').fit(X, X[:, :2] - 9)": "but class probabilities must be at least 0; correct",
    "network('binary_crossentropy').fit(X, X[:, :2] - 9)": "but binary targets must be from 0 (no) to 1 (yes); correct",
    # weights that were inputs
    "T.bind(MODEL, {'w': X})": "'w' is not an input of the model; its inputs are 'x'",
    "T.bind(TWO, {'a': X})": "the value of 'a' is float32 [40, 3], but the input needs float32 ['N', 2]",
    "T.bind(TWO, {'a': np.ones((1, 2))})": "the value of 'a' is float64 [1, 2], but the input needs float32 ['N', 2]",
    "T.bind(TWO, {'a': 1.0})": "the value of 'a' is float64 [], but the input needs float32 ['N', 2]; convert or",
}


MADE = (network, step, trainer, gradients_of, optimizer, restored, scaled, half, other_checkpoint)
VALUES = {
    "A": amp_rewrite,
    "T": T,
    "SGD": SGD,
    "IndexedSlices": IndexedSlices,
    "np": np,
    "X": X,
    "Y": Y,
    "F32": F32,
    "MODEL": MODEL,
    "TWO": TWO,
    "BARE": BARE,
    "HALF_LOSS": HALF_LOSS,
    "ALONE": SingleReplica(),
}
NAMES = VALUES | {"SPARSE": SPARSE, "CROSS": CROSS} | {made.__name__: made for made in MADE}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answered(code: str, words: str, names: dict[str, Any]) -> None:
    """Run the code, and check that its error or warning contains the words."""
    with warnings.catch_warnings(), pytest.raises((AmpRewriteError, AttributeError, UserWarning)) as error:
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", UserWarning)
        eval(code, names)
    assert words in str(error.value)


@pytest.mark.parametrize(("code", "words"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_answered_with_a_remedy(code: str, words: str) -> None:
    answered(code, words, dict(NAMES))


LINEAR = "from_torch(torch.nn.Linear(3, 2), torch.ones(2, 3)"
OF_TORCH = {
    "network(torch.nn.CrossEntropyLoss())": "or a name, not CrossEntropyLoss()",
    "network(optimizer=torch.optim.SGD(linear.parameters(), 0.1))": "torch's SGD is not an optimizer; pass an",
    "network().set_weights(linear.state_dict())": "set_weights takes 2 arrays, in this order: w, b",
    "gradients_of(linear.parameters())": "Parameter is not a Variable; pass Variables",
    "T.from_torch(linear, None)": "the example must be a tensor or an array",
    "T.from_torch(linear, 'x')": "a tuple or mapping of them, not 'x'",
    "T.from_torch(linear, torch.ones(2, 5))": "the module fails on the example",
    "T.from_torch(torch.jit.script(linear), torch.ones(2, 3))": "cannot export a module compiled by torch.jit",
    "T.from_torch(torch.nn.Linear(3, 2).half(), torch.ones(2, 3))": "must be float32; pass module.float()",
    "T.from_torch(torch.nn.ReLU(), torch.ones(2, 3))": "the module has no parameters, so there is nothing to train",
    "T.from_torch(torch.nn.Linear, torch.ones(2, 3))": "pass an instance of torch.nn.Module",
    "T.from_torch(torch.nn.LazyLinear(3), torch.ones(2, 3))": "call the module once with the example",
    f"T.{LINEAR}, dynamic=['batch'])": "as in dynamic={'input': {0: 'batch'}}",
    f"T.{LINEAR}, dynamic={{'x': {{0: 'n'}}}})": "name axes of the inputs input, as in dynamic={'input': {0: 'batch'}}",
    f"T.{LINEAR}, dynamic_axes={{}})": "use dynamic, as in dynamic={'input': {0: 'batch'}}",
    f"T.{LINEAR}, outputs=['a', 'b'])": "outputs has 2 names, but the module returns 1 tensor; pass one name",
    f"T.{LINEAR}, opset='twenty')": "opset must be a whole number ≥ 18, not 'twenty'",
}


@pytest.mark.torch
@pytest.mark.parametrize(("code", "words"), OF_TORCH.items(), ids=OF_TORCH)
def test_a_mistake_with_torch_is_answered_with_a_remedy(code: str, words: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answered(code, words, {**NAMES, "torch": torch, "linear": torch.nn.Linear(3, 2)})
