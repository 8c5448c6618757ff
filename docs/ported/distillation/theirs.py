"""Knowledge distillation: first a teacher is trained, then a student."""

import keras
from keras import ops
from pupils import images, labels, make_network

ALPHA, TEMPERATURE = 0.1, 10


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.student_loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )
        self.distillation_loss = keras.losses.KLDivergence()

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        told = self.teacher(x, training=False)
        distilled = self.distillation_loss(
            ops.softmax(told / TEMPERATURE), ops.softmax(y_pred / TEMPERATURE)
        )
        distilled *= TEMPERATURE**2
        own = self.student_loss(y, y_pred)
        return ALPHA * own + (1 - ALPHA) * distilled

    def call(self, x):
        return self.student(x)


keras.utils.set_random_seed(0)
teacher = make_network("teacher", 16)
student = make_network("student", 4)
teacher.compile(
    optimizer=keras.optimizers.Adam(),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
teacher.fit(images, labels, batch_size=64, epochs=2, shuffle=False, verbose=0)
teacher.trainable = False
distiller = Distiller(student, teacher)
distiller.compile(optimizer=keras.optimizers.Adam())
distiller.fit(images, labels, batch_size=64, epochs=1, shuffle=False, verbose=0)
weights = teacher.get_weights() + student.get_weights()
