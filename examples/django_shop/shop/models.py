from django.db import models


class Order(models.Model):
    customer = models.TextField()
    cents = models.IntegerField()


class Bill(models.Model):
    order_id = models.BigIntegerField()
    customer = models.TextField()
    cents = models.IntegerField()
